"""What one block moves through memory in a training step outside of GEMMs and attention, counted by the
checked emulator on the way through the whole program: bytes that each kernel reads and writes, each byte once per block
of threads (what a block reads again comes from L1). The difference of one layer more is a block's, the difference of
more rows is what a row costs; what does not grow with the rows, partial sums of the norms' weight gradients, is shared
out among the 16384 rows of a micro-batch of 16 x 1024."""
import json
import re

import init
import pytest
from util import ROOT, gpt2_config, llama_config, shard_write, train_gpt

C, NH, T, F_LLAMA = 64, 4, 16, 176
ROWS, ROWS_OF_BATCH = 512, 16384                     # from 512 rows on the norms have as many partial sums as ever
CONFIGS = {"gpt2": gpt2_config, "llama": lambda *args, **kw: llama_config(*args, F=F_LLAMA, **kw)}
APART = {"products": r"cublasLt", "attention": r"attention_", "at the start": r"cudaMemset$|cudaMemcpy",
         "once a step": r"adamw|global_norm|step_state|state_hash|cudaMemsetAsync"}
# Elements a row: two norms that add (4 C), their backwards (4 C). LLaMA: q and k rotated in place, forward and backward
# (2 * 2 C each); SwiGLU on F, 3 F and 5 F. GELU is part of the GEMMs, and the bias; of the bias gradients what GEMMs
# have as gradients of their outputs is read once more (3 C, C, 4 C, C).
IDEAL = {"gpt2": (16 + 9) * C, "llama": (16 + 8) * C + 8 * F_LLAMA}
BOUND = {"gpt2": 31 * C, "llama": 1.1 * IDEAL["llama"]}


def moved(folder, family, layers, rows, precision):
    """{kernel or library call: bytes} of one training step."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[family](97, C, T, L=layers, NH=NH)))
    shard_write(folder / "data" / "train_000000.bin", init.tokens(2 * ROWS + 1, 97, 3), 97)
    run = train_gpt("-m", folder, "--from-scratch", "-d", folder / "data", "-n", 1, "-b", rows // T, "-t", T,
                    "-p", precision, "--sample-tokens", 0, device="emu", EMU_COUNT="moved", OMP_NUM_THREADS="1")
    return {name: int(size) for name, size in re.findall(r"^moved by \(?(.*?)\)?: (\d+) bytes in", run.err, re.M)}


@pytest.mark.parametrize("family", CONFIGS)
def test_block(tmp_path, monkeypatch, family, precision="bf16", elem_bytes=2):
    if not (ROOT / "build/check/train_gpt").exists():
        pytest.skip("the checked variant is not built")
    monkeypatch.setenv("TRAIN_GPT_EMU", "build/check/train_gpt")
    runs = {(layers, rows): moved(tmp_path / f"{layers}_{rows}", family, layers, rows, precision)
            for layers in (1, 2) for rows in (ROWS, 2 * ROWS)}
    a_row, rest = dict.fromkeys(["block", *APART], 0), dict.fromkeys(["block", *APART], 0)
    for name in runs[2, ROWS]:
        few, many = ((runs[2, rows].get(name, 0) - runs[1, rows].get(name, 0)) / elem_bytes / C
                     for rows in (ROWS, 2 * ROWS))
        kind = next((kind for kind, pattern in APART.items() if re.search(pattern, name)), "block")
        a_row[kind] += (many - few) / ROWS
        rest[kind] += 2 * few - many
        if few or many:
            print(f"{name:40} {kind:12} {(many - few) / ROWS:6.2f} C elements a row, {2 * few - many:8.0f} C more")
    block = a_row["block"] + rest["block"] / ROWS_OF_BATCH
    print(f"{family}: {a_row['block']:.2f} C elements a row, {block:.2f} C with its share of the rest, ideal "
          f"{IDEAL[family] / C:.2f} C; attention {a_row['attention']:.2f} C, products {a_row['products']:.2f} C")
    assert a_row["once a step"] == 0
    assert IDEAL[family] <= block * C <= BOUND[family]
