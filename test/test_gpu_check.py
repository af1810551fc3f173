"""scripts/gpu_check.sh: each row is a process of its own, a failing one is one red row with its lines, and all others
still run. Here with programs that only say what the real ones would; --full runs the real ones in the emulator."""
import itertools
import os
import subprocess
import tarfile

import pytest
from util import FULL, ROOT, binary, environment

OPS = """case $* in
--list) printf 'rmsnorm\\nrope\\nstep\\n' ;;
"--op rope") [ "${0##*.}" = bf16 ] && { echo "FAIL rope_forward out[3] err 0.5 bound 0.001"
    echo "emulator: a wild access" >&2; kill -SEGV $$; } ;;
"--op step") [ "${0##*.}" = bf16 ] && sleep 60 ;;
esac
echo "7 passed, 0 failed" """
TRAIN = """for word in "$@"; do
    [ "$previous" != -o ] || { mkdir -p "$word"; echo '{"step": 1, "loss": 5.5, "norm": 1}' > "$word/log.jsonl"; }
    [ "$previous" != -o ] || echo '[{"ph": "X"}]' > "$word/trace.json"
    [ "$TRAIN_GPT_SHARE_GPU$previous$word" != "1-z2" ] || exit 1
    previous=$word
done
echo "state hash 0000000000000011 after step 1" """
MPIRUN = """until [[ $1 = train_gpt || $1 = test_nccl ]]; do shift; done; exec "$@" """


def pack(folder):
    for name, text in (("train_gpt", TRAIN), ("test_emu", "echo 3 passed"), ("test_nccl", "echo 9 passed"),
                       ("mpirun", MPIRUN), *((f"test_ops.{p}", OPS) for p in ("fp32", "bf16", "fp16"))):
        path = folder / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    for name in itertools.product(("gpt", "llama", "qwen3"), ("fp32", "bf16", "fp16")):
        (folder / "reference").mkdir(exist_ok=True)
        (folder / "reference" / ".".join(name)).write_text("5.6\n" if name == ("llama", "fp32") else "5.5\n")
    (folder / "models" / "gpt").mkdir(parents=True)
    (folder / "version").write_text("abc\n")
    (folder / "size").write_text("4 32\n")
    return folder


def check(folder, out, *flags, **env):
    return subprocess.run([ROOT / "scripts" / "gpu_check.sh", "--dry", *flags, folder], cwd=out, text=True,
                          capture_output=True, env={**environment(), "OUT": str(out), **env}, timeout=900)


def test_rows(tmp_path):
    """A crash, an operation that does not end, a loss that is off and a stage that fails with 2 and with 4 ranks: five
    red rows of all."""
    done = check(pack(tmp_path / "pack"), tmp_path, ROW_LIMIT_S="2")
    rows = (tmp_path / "results.txt").read_text()
    red = [line for line in rows.splitlines() if " s  FAIL" in line]
    assert done.returncode == 1 and len(red) == 5, rows
    assert "op bf16 rope" in red[0] and "FAIL rope_forward out[3] err 0.5 bound 0.001" in rows
    assert "emulator: a wild access" in rows
    assert "op bf16 step" in red[1] and "no end within" in red[1]
    assert "losses llama fp32" in red[2] and "1 losses, at most 0.018 off (limit 1e-05)" in rows
    assert "bits gpt, 2 ranks -z 2" in red[3] and "bits gpt, 4 ranks -z 2" in red[4]
    for name in ("report", "op fp32 rope", "device, cuBLASLt", "losses gpt bf16", "losses qwen3 bf16",
                 "bits gpt resumed", "bits gpt -r block", "bits llama --offload", "bits gpt dropout", "trace",
                 "collectives, 2 ranks", "losses gpt bf16, 4 ranks", "bits gpt, 4 ranks -z 3"):
        assert f"  ok    {name}" in rows, rows
    assert rows.splitlines()[-1].startswith(f"{rows.count('  ok    ')} passed, 5 failed, ")
    with tarfile.open(tmp_path / "logs.tar.gz") as logs:
        assert "logs/op_bf16_rope.log" in logs.getnames()


def test_ends_in_time(tmp_path):
    done = check(pack(tmp_path / "pack"), tmp_path, LIMIT_S="11")
    rows = (tmp_path / "results.txt").read_text().splitlines()
    assert sum("no time is left" in row for row in rows) > 20 and int(rows[-1].split()[-2]) < 15, done.stdout


@pytest.mark.skipif(not FULL, reason="--full: runs for minutes")
def test_dry_run(tmp_path):
    if not binary("emu").exists():
        pytest.skip("emu is not built")
    folder = tmp_path / "pack"
    subprocess.run(["scripts/gpu_pack.sh", "--dry", folder], cwd=ROOT, env=environment(), check=True)
    done = check(folder, tmp_path, LIMIT_S="800")
    assert done.returncode == 0 and " 0 failed, " in done.stdout.splitlines()[-1], done.stdout
    os.replace(folder / "bin" / "test_ops.fp32", folder / "bin" / "ops")
    (folder / "bin" / "test_ops.fp32").write_text('#!/bin/sh\n[ "$2" = rope ] && exit 1\nexec "${0%/*}/ops" "$@"\n')
    (folder / "bin" / "test_ops.fp32").chmod(0o755)
    broken = check(folder, tmp_path, LIMIT_S="800")
    assert broken.returncode == 1 and ", 1 failed, " in broken.stdout.splitlines()[-1], broken.stdout
