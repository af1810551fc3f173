#!/usr/bin/env bash
# Packs what scripts/gpu_check.sh needs on a machine that has a GPU, its driver and cuBLASLt and nothing else, not even
# a network: programs, libraries, models, data, and the losses that the CPU build has with them. The programs are built
# with SHARE_GPU=1, for several ranks on the one GPU, and Open MPI comes along.
#   scripts/gpu_pack.sh [--dry] [FOLDER]      FOLDER: build/gpu_pack; --dry: the programs of the emulated build
# ARCH: the compute capability there (90). At most 48 MiB.
set -euo pipefail
cd "$(dirname "$0")/.."

dry=""
if [ "${1:-}" = --dry ]; then dry=1; shift; fi
pack=${1:-build/gpu_pack} programs=(train_gpt test_ops.fp32 test_ops.bf16 test_ops.fp16 test_emu test_nccl)
if [ -n "$dry" ]; then
    build=build/emu
    make -s DEVICE=emu "${programs[@]/#/$build/}"
else
    build=build/cuda-share
    make -s DEVICE=cuda SHARE_GPU=1 ARCH="${ARCH:-90}" "${programs[@]/#/$build/}"
fi
make -s DEVICE=cpu build/cpu/train_gpt

rm -rf "$pack"
mkdir -p "$pack"/{bin,lib/usual,openmpi,models/{gpt,llama,qwen3,llama3-8b-l4},data/{small,gpt2},reference}
for program in "${programs[@]}"; do cp "$build/$program" "$pack/bin/"; done

# Open MPI's launcher and plugins, without those of networks and of OpenSHMEM.
if plugins=$(ompi_info --parsable --path pkglibdir 2> /dev/null | cut -d : -f 3); then
    for plugin in "$plugins"/mca_*.so; do
        case ${plugin##*/mca_} in
            *_ofi.so | *_ucx.so | *_openib.so | *_psm*.so | *_netlink.so | *_monitoring.so) ;;
            atomic_* | memheap_* | scoll_* | spml_* | sshmem_*) ;;
            *) cp "$plugin" "$pack/openmpi/" ;;
        esac
    done
    cp -L "$(type -P orterun)" "$pack/bin/mpirun"
else
    echo "gpu_pack: no Open MPI here: gpu_check.sh runs several ranks only if it finds an mpirun" >&2
fi

# What a machine may not have; lib/usual: what almost all have, used only where it is missing.
libraries=$(ldd "$pack"/bin/* "$pack"/openmpi/*.so | awk '$2 == "=>" { print $3 }' | sort -u)
grep -E '/lib(cjson|pcre2|gomp|mpi|open-|mca_common|pmix|event|hwloc|munge)[^/]*$' <<< "$libraries" |
    xargs -I {} cp -L {} "$pack/lib/"
grep -E '/lib(udev|z)\.so[^/]*$' <<< "$libraries" | xargs -I {} cp -L {} "$pack/lib/usual/"
find "$pack/bin" "$pack/lib" "$pack/openmpi" -type f -exec strip {} +
cp scripts/gpu_check.sh dev/torch_gpt2.py "$pack/"
version=$(git rev-parse --short HEAD 2> /dev/null || echo "no commit")
echo "$version${dry:+, emulated device, tiny sizes: no time means anything}" > "$pack/version"

# Heads of 64 and of 128, as the kernels on tensor cores have them; a vocabulary that is padded.
cat > "$pack/models/gpt/config.json" << 'END'
{"model_type": "gpt2", "vocab_size": 500, "n_positions": 128, "n_embd": 128, "n_layer": 3, "n_head": 2}
END
cat > "$pack/models/llama/config.json" << 'END'
{"model_type": "llama", "vocab_size": 500, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
 "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "tie_word_embeddings": false}
END
# Norms of queries and keys, and heads whose size is not that of hidden_size / heads.
cat > "$pack/models/qwen3/config.json" << 'END'
{"model_type": "qwen3", "vocab_size": 500, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128,
 "tie_word_embeddings": true}
END
cat > "$pack/models/llama3-8b-l4/config.json" << 'END'
{"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
 "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
 "tie_word_embeddings": false}
END

# The golden losses of GPT-2 124M are PyTorch's; shards of their tokens and of the small models'.
PYTHONPATH=dev:test .venv/bin/python - "$pack" << 'END'
import json, pathlib, sys
import init, util
pack = pathlib.Path(sys.argv[1])
golden = json.load(open("test/golden/gpt2_124m.json"))
h = golden["hyper"]
tokens = init.tokens(h["steps"] * h["B"] * h["T"] + 1, 50257, h["data_seed"])
util.shard_write(pack / "data/gpt2/train_000000.bin", tokens, 50257)
(pack / "reference/gpt2.fp32").write_text("".join(f"{loss:.9g}\n" for loss in golden["losses"]))
# Tokens that can be learned: each follows from the one before, four times of five.
noise = init.tokens(40001, 500, 1)
tokens = [noise[0]]
for i, other in enumerate(noise[1:]):
    tokens.append(int(other) if i % 5 == 4 else (int(tokens[-1]) * 7 + 3) % 500)
util.shard_write(pack / "data/small/train_000000.bin", tokens, 500)
END

# As gpu_check.sh calls it.
steps=20 T=128
if [ -n "$dry" ]; then steps=4 T=32; fi
echo $steps $T > "$pack/size"
for model in gpt llama qwen3; do
    for precision in fp32 bf16 fp16; do
        OMP_NUM_THREADS=1 build/cpu/train_gpt -m "$pack/models/$model" --from-scratch -d "$pack/data/small" \
            -p $precision -b 2 -t $T -g 2 -n $steps -l 1e-3 --warmup 2 --sample-tokens 0 \
            -o "$pack/reference/run" > /dev/null
        sed -n 's/^{"step": .*"loss": \([^,]*\),.*/\1/p' "$pack/reference/run/log.jsonl" \
            > "$pack/reference/$model.$precision"
        rm -r "$pack/reference/run"
    done
done
du -sk "$pack" | awk '{ print "gpu_pack: " $2 " has " int($1 / 1024 + 0.5) " MiB"; exit $1 > 48 * 1024 }' ||
    { echo "gpu_pack: more than 48 MiB" >&2; [ -n "$dry" ]; }
