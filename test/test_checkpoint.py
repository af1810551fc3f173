"""Checkpoints: nothing is lost when a run is killed, a disk is full or a bit flips; any layout resumes any other."""
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time

import init
import pytest
from util import (FULL, built_devices, command, environment, gpt2_config, in_rank_order, safetensors_header,
                  saved_bytes, shard_write, train_gpt)

CONFIG = gpt2_config(97, 48, 24, L=2, NH=3)
NUM_PARAMS = 97 * 48 + 24 * 48 + 2 * (12 * 48 * 48 + 13 * 48) + 2 * 48


def flags(folder, steps, *more, config=CONFIG):
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    shard_write(folder / "data" / "train_000000.bin", init.tokens(5000, 97, 3), 97)
    return ["-m", folder / "model", "--from-scratch", "-d", folder / "data", "-n", steps, "-l", 1e-3, "--warmup", 4,
            "--schedule", "constant", "--sample-tokens", 0, *more]


def lines_of(folder):
    """The steps of the log as they stand in it; every line must be whole."""
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [entry for entry in entries if "loss" in entry]


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("step_*"))


@pytest.fixture(scope="module", params=built_devices())
def device(request):
    return request.param


# ---- killed -----------------------------------------------------------------------------------------------------
def ranks_of(process, ranks):
    """Process ids of a run's ranks: the process itself, or mpirun's children."""
    if ranks == 1:
        return [process.pid]
    children = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == process.pid:
            children.append(int(stat.parent.name))
    return children


def run_and_kill(args, ranks, device, chance):
    """Starts a run and kills some or all of its ranks at a random moment after its first step."""
    process = subprocess.Popen(command(args, ranks, device), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               text=True, env=environment(OMP_NUM_THREADS="1"), stdin=subprocess.DEVNULL)
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("step "):
            break
    wait_s = chance.random() * 0.3
    time.sleep(wait_s)
    victims = ranks_of(process, ranks)
    victims = victims if ranks == 1 or chance.random() < 0.7 else [chance.choice(victims)]
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    said += process.stdout.read()
    assert process.wait(timeout=60) != 0, said
    return said, f"{len(victims)} of {ranks} ranks killed {1000 * wait_s:.0f} ms after the first step"


@pytest.mark.parametrize("ranks,stage", [(1, 0), (3, 2)])
def test_killed(tmp_path, ranks, stage):
    """Killed at random moments while every step is saved: resumes from a complete checkpoint, to the same losses."""
    chance, out, reached = random.Random(ranks), tmp_path / "run", 0
    layout = ["-z", stage, "-b", 12 // ranks, "--timeout", 20]
    args = flags(tmp_path, 100000, *layout, "--save-every", 1, "--keep", 3, "--resume", "auto", "-o", out)
    for i in range(50 if FULL else 4):
        said, what = run_and_kill(args, ranks, "cpu", chance)
        resumed = re.search(r"^resume .*: step (\d+),", said, re.M)
        assert int(resumed[1]) if resumed else 0 >= reached, said
        assert "damaged" not in said
        newest = max([int(name[5:]) for name in checkpoints(out) if name[5:].isdigit()], default=0)
        assert newest >= reached
        print(f"{i + 1}: from {resumed[1] if resumed else 'nothing'} on; {what}; step {newest} is complete, there are "
              f"{' '.join(checkpoints(out))}")
        reached = newest
    args[args.index(100000)] = reached + 3
    train_gpt(*args, ranks=ranks, OMP_NUM_THREADS="1")
    whole = train_gpt(*flags(tmp_path, reached + 3, *layout), ranks=ranks, out=tmp_path / "whole", OMP_NUM_THREADS="1")
    lines = lines_of(out)
    assert [entry["step"] for entry in lines] == list(range(1, reached + 4))
    for key in ("loss", "norm", "lr"):
        assert [entry[key] for entry in lines] == whole.series(key)
    assert lines[-1]["state_hash"] == whole.log[-1]["state_hash"]
    assert checkpoints(out) == [f"step_{reached + i:08d}" for i in (1, 2, 3)]


# ---- no room ----------------------------------------------------------------------------------------------------
LIMITED = ["bash", "-c", 'ulimit -f 8000; exec "$@"', "_"]      # KiB; Open MPI itself needs more than 4000
LARGE = gpt2_config(12000, 96, 24, L=1, NH=3)                   # 4.9 MB of weights, twice that of moments


@pytest.mark.parametrize("ranks", [1, 3])
def test_file_size_limit(tmp_path, ranks):
    """A save that meets a limit is reported, leaves nothing partial and the earlier checkpoint whole; training
    continues."""
    layout = ["-z", 1, "-b", 3 // ranks, "--save-every", 2]
    out = tmp_path / "run"
    train_gpt(*flags(tmp_path, 2, *layout, config=LARGE), ranks=ranks, out=out)
    more = flags(tmp_path, 9, *layout, "--resume", "auto", config=LARGE)
    run = train_gpt(*more, ranks=ranks, out=out, wrapper=LIMITED, ok=False)
    assert run.code == 1 and "step 9/9" in run.out
    assert len(run.complaint) >= 2 and "File too large" in run.complaint[0]
    assert str(out / "step_00000002") in run.complaint[0] and "training continues" in run.complaint[0]
    assert "step_00000009 is not saved" in run.complaint[-1]
    assert checkpoints(out) == ["step_00000002"]

    run = train_gpt(*more, "--on-save-error", "stop", ranks=ranks, out=out, wrapper=LIMITED, ok=False)
    assert run.code == 1 and "step 9/9" not in run.out and "step_00000004 is not saved" in run.complaint[0]
    assert checkpoints(out) == ["step_00000002"]

    rest = train_gpt(*more, ranks=ranks, out=out)
    whole = train_gpt(*flags(tmp_path, 9, *layout, config=LARGE), ranks=ranks, out=tmp_path / "whole")
    assert rest.series("loss") == whole.series("loss")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True,
                             text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_full_disk(tmp_path, small_disk, ranks):
    """Room for two checkpoints: the third is not saved, those before are whole. With --keep 1 there is always room."""
    layout = ["-z", 1, "-b", 12 // ranks, "--save-every", 2]
    out = small_disk / "run"
    run = train_gpt(*flags(tmp_path, 8, *layout), ranks=ranks, out=out, ok=False)
    assert run.code == 1 and "step 8/8" in run.out
    assert "No space left" in run.complaint[0] and "step_00000006 is not saved" in run.complaint[0]
    assert checkpoints(out) == ["step_00000002", "step_00000004"]
    rest = train_gpt(*flags(tmp_path, 9, *layout, "--resume", "auto", "--keep", 1), ranks=ranks, out=out)
    assert checkpoints(out) == ["step_00000009"] and rest.complaint == []
    whole = train_gpt(*flags(tmp_path, 9, *layout), ranks=ranks, out=tmp_path / "whole")
    assert rest.series("loss") == whole.series("loss")


def test_full_disk_and_the_log(tmp_path, small_disk):
    """No room for a line: reported once, training continues; the file has whole lines only."""
    (small_disk / "filler").write_bytes(bytes(2**21 - 4 * 4096))
    run = train_gpt(*flags(tmp_path, 80, "-b", 1), out=small_disk / "run", ok=False)
    assert run.code == 1 and "step 80/80" in run.out and len(run.complaint) == 2
    assert "log.jsonl: cannot be written" in run.complaint[0] and "step_00000080 is not saved" in run.complaint[1]
    assert [entry["step"] for entry in lines_of(run.folder)] == list(range(1, len(lines_of(run.folder)) + 1))


# ---- flipped bits -----------------------------------------------------------------------------------------------
def flip(path, place):
    """One bit of the byte at `place`."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << place % 8
    path.write_bytes(bytes(data))


def place_in(path, name, share):
    """Offset of a part of a tensor in a safetensors file."""
    begin, end = safetensors_header(path)[name]["data_offsets"]
    return 8 + int.from_bytes(path.read_bytes()[:8], "little") + begin + int(share * (end - begin - 1))


FLIPS = [("model", "transformer.wte.weight", 0), ("model", "transformer.h.1.ln_2.bias", 1),
         ("optimizer", "transformer.h.0.mlp.c_fc.weight.m", 0.6), ("optimizer", "transformer.ln_f.bias.v", 0.3)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run = train_gpt(*flags(folder, 6, "-b", 12, "--save-every", 2), out=folder / "run")
    return folder, run


@pytest.mark.parametrize("ranks,stage", [(1, 0), (2, 0), (3, 2)])
def test_flipped_bit_of_a_tensor(tmp_path, saved, ranks, stage):
    """Refused by the tensor's name; `--resume auto` takes the checkpoint before, and reports it."""
    folder, whole = saved
    out = tmp_path / "run"
    args = [*flags(folder, 6)[3:], "-z", stage, "-b", 12 // ranks]
    for file, name, share in FLIPS if FULL or ranks == 1 else FLIPS[ranks - 1:ranks]:
        shutil.copytree(whole.folder, out)
        path = out / "step_00000006" / f"{file}.safetensors"
        flip(path, place_in(path, name, share))
        run = train_gpt("--resume", path.parent, *args, ranks=ranks, ok=False)
        assert run.code == 1 and path.name in run.complaint[0] and f"tensor {name} " in run.complaint[0]
        run = train_gpt("--resume", "auto", *args, ranks=ranks, out=out)
        assert f"tensor {name} " in run.out and "resuming from the one before" in run.out
        assert "step_00000004: step 4" in run.out
        assert checkpoints(out) == ["step_00000002", "step_00000004", "step_00000006", "step_00000006.damaged"]
        assert [entry["step"] for entry in lines_of(out)] == [1, 2, 3, 4, 5, 6]
        assert run.series("loss") == pytest.approx(whole.series("loss"), rel=1e-6)
        shutil.rmtree(out)


def test_flipped_bit_elsewhere(tmp_path, saved):
    """Of a header, state.json or config.json: the file is named. A file that is short or gone: the same."""
    folder, whole = saved
    out = tmp_path / "run"
    args = flags(folder, 6, "-b", 12)[3:]
    for name, spoil in [("model.safetensors", lambda path: flip(path, 30)),
                        ("optimizer.safetensors", lambda path: flip(path, 100)),
                        ("state.json", lambda path: flip(path, 40)),
                        ("state.json", lambda path: flip(path, path.stat().st_size - 8)),
                        ("config.json", lambda path: flip(path, path.read_text().index("n_positions"))),
                        ("optimizer.safetensors", lambda path: os.truncate(path, path.stat().st_size - 4)),
                        ("model.safetensors", lambda path: path.unlink())]:
        shutil.copytree(whole.folder, out)
        path = out / "step_00000006" / name
        spoil(path)
        run = train_gpt("--resume", path.parent, "-m", folder / "model", *args, ok=False)
        assert run.code == 1 and str(path) in run.complaint[0]
        run = train_gpt("--resume", "auto", *args, out=out)
        assert str(path) in run.out and "resuming from the one before" in run.out and "step_00000004: step 4" in run.out
        shutil.rmtree(out)


def test_without_state_json(tmp_path, saved):
    """A folder step_N without state.json is no checkpoint: `--resume auto` reports it and takes the one before, and so
    does `--resume FOLDER`; if there is none before, the run does not start anew over it."""
    folder, whole = saved
    out = tmp_path / "run"
    args = flags(folder, 6, "-b", 12)[3:]
    shutil.copytree(whole.folder, out)
    (out / "step_00000006" / "state.json").unlink()
    assert "step_00000004: step 4" in train_gpt("--resume", out, *args, out=tmp_path / "elsewhere").out
    run = train_gpt("--resume", "auto", *args, out=out)
    assert f"damaged {out / 'step_00000006' / 'state.json'}: cannot be opened" in run.out
    assert "resuming from the one before" in run.out and "step_00000004: step 4" in run.out
    assert checkpoints(out) == ["step_00000002", "step_00000004", "step_00000006", "step_00000006.damaged"]
    assert [entry["step"] for entry in lines_of(out)] == [1, 2, 3, 4, 5, 6]
    assert run.series("loss") == whole.series("loss")
    for step in (2, 4, 6):
        (out / f"step_0000000{step}" / "state.json").unlink()
    run = train_gpt("--resume", "auto", *args, out=out, ok=False)
    assert run.code == 1 and "every checkpoint there is damaged" in run.complaint[0]


def test_another_model_or_optimizer(tmp_path, saved):
    """What does not fit is refused, not set aside as damaged."""
    folder, whole = saved
    shutil.copytree(whole.folder, tmp_path / "run")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(dict(CONFIG, n_layer=3)))
    for more, word in [(["-m", tmp_path / "model"], "h.2."), (["--optimizer", "lion"], "--optimizer adamw")]:
        run = train_gpt("--resume", "auto", *flags(folder, 6, "-b", 12)[3:], *more, out=tmp_path / "run", ok=False)
        assert run.code == 1 and word in run.complaint[0]
        assert checkpoints(tmp_path / "run") == checkpoints(whole.folder)


def test_all_damaged(tmp_path, saved):
    """`--resume auto` does not start anew over a run that cannot be read."""
    folder, whole = saved
    shutil.copytree(whole.folder, tmp_path / "run")
    for path in (tmp_path / "run").glob("step_*/model.safetensors"):
        flip(path, path.stat().st_size - 1)
    run = train_gpt("--resume", "auto", *flags(folder, 6, "-b", 12)[3:], out=tmp_path / "run", ok=False)
    assert run.code == 1 and "every checkpoint there is damaged" in run.complaint[0]


def test_nothing_begins_anew(tmp_path, saved):
    """Where checkpoints have been, `--resume auto` refuses until one is back: at every start, and with the log alone.
    Where there never was one it begins anew, and keeps the log of that start."""
    folder, whole = saved
    out = tmp_path / "run"
    args = flags(folder, 6, "-b", 12, "--resume", "auto")
    shutil.copytree(whole.folder, out)
    for path in out.glob("step_*/state.json"):
        path.unlink()
    for _ in range(2):
        run = train_gpt(*args, out=out, ok=False)
        assert run.code == 1 and "is damaged, the newest is step_00000006.damaged: bring" in run.complaint[0]
        assert [entry["step"] for entry in lines_of(out)] == [1, 2, 3, 4, 5, 6]
    for path in out.glob("step_*"):
        shutil.rmtree(path)
    run = train_gpt(*args, out=out, ok=False)
    assert run.code == 1 and "its log says that there was one of step 6" in run.complaint[0]
    log = (out / "log.jsonl").read_text()
    (out / "log.jsonl").write_text("".join(line for line in log.splitlines(True) if "saved" not in line))
    run = train_gpt(*args, out=out)
    assert f"kept as {out / 'log.jsonl.1'}" in run.out and run.log[-1]["state_hash"] == whole.log[-1]["state_hash"]
    assert [entry["step"] for entry in lines_of(out)] == [1, 2, 3, 4, 5, 6]


def test_another_disk(tmp_path, saved):
    """A checkpoint that is a link to a folder which is not there now is not damaged: nothing is renamed."""
    folder, whole = saved
    out = tmp_path / "run"
    shutil.copytree(whole.folder, out)
    shutil.rmtree(out / "step_00000006")
    (out / "step_00000006").symlink_to(tmp_path / "not mounted")
    run = train_gpt("--resume", "auto", *flags(folder, 6, "-b", 12)[3:], out=out, ok=False)
    assert run.code == 1 and "a link to a folder that is not mounted?" in run.complaint[0]
    assert checkpoints(out) == checkpoints(whole.folder)


# ---- what is removed --------------------------------------------------------------------------------------------
def test_links_are_not_followed(tmp_path):
    """A checkpoint on another disk, with a link to it in its place: --keep removes the link. The same of what a killed
    save seems to have left."""
    out, disk = tmp_path / "run", tmp_path / "disk"
    args = ["-b", 4, "--save-every", 2, "--keep", 1, "--resume", "auto"]
    train_gpt(*flags(tmp_path, 2, *args), out=out)
    (out / "step_00000002").rename(disk)
    (out / "step_00000002").symlink_to(disk)
    (out / "step_00000004.tmp").symlink_to(disk)
    before = sorted(path.name for path in disk.iterdir())
    run = train_gpt(*flags(tmp_path, 6, *args), out=out)
    assert "step_00000002: step 2" in run.out and run.complaint == [] and checkpoints(out) == ["step_00000006"]
    assert sorted(path.name for path in disk.iterdir()) == before != []


def test_what_is_not_ours_stays(tmp_path):
    """A file that NFS keeps for another process, one of the Finder's or a folder in a checkpoint that --keep removes:
    said and left; saves and starts go on."""
    out = tmp_path / "run"
    args = ["-b", 4, "--save-every", 1, "--keep", 1, "--resume", "auto"]
    train_gpt(*flags(tmp_path, 1, *args), out=out)
    (out / "step_00000001" / ".nfs0001").touch()
    run = train_gpt(*flags(tmp_path, 2, *args), out=out)
    assert len(run.complaint) == 1 and "step_00000001.tmp/.nfs0001: cannot be removed and stays" in run.complaint[0]
    (out / "step_00000003.tmp" / "mine").mkdir(parents=True)
    run = train_gpt(*flags(tmp_path, 4, *args), out=out)
    assert len(run.complaint) == 2 and "step_00000003.tmp/mine: cannot be removed and stays" in run.err
    assert checkpoints(out) == ["step_00000001.tmp", "step_00000003.tmp", "step_00000004"]
    assert {path.name for path in out.glob("step_*.tmp/*")} == {".nfs0001", "mine"}


# ---- anywhere ---------------------------------------------------------------------------------------------------
def test_resume_anywhere(tmp_path, device):
    """1 rank, 3, 5, 2, 1, each at another stage, and 3 at stage 0: the losses of an unbroken run, files of one size,
    reads by share."""
    chain = [(1, 0), (3, 2), (5, 1), (2, 3), (1, 0), (3, 0)] if device == "cpu" or FULL else [(1, 0), (3, 2), (2, 0)]
    num_steps = 3 * len(chain)
    order = in_rank_order(device)
    whole = train_gpt(*flags(tmp_path, num_steps, "-b", 30, *order), out=tmp_path / "whole", device=device)
    sizes, out = set(), tmp_path / "run"
    for i, (ranks, stage) in enumerate(chain):
        run = train_gpt(*flags(tmp_path, 3 * i + 3, "-b", 30 // ranks, "-z", stage, "--resume", "auto", *order),
                        ranks=ranks, device=device, out=out)
        sizes.add(tuple((run.checkpoint(3 * i + 3) / f"{name}.safetensors").stat().st_size
                        for name in ("model", "optimizer")))
        read = re.search(r"(\d+) to (\d+) bytes of tensors read by each rank", run.out)
        if i == 0:
            continue
        share = 12 * NUM_PARAMS / ranks
        assert 0.9 * share < int(read[1]) <= int(read[2]) < 1.1 * share
    assert len(sizes) == 1
    assert [entry["step"] for entry in lines_of(out)] == list(range(1, num_steps + 1))
    assert run.series("loss") == pytest.approx(whole.series("loss"), rel=1e-6)
    assert run.series("norm") == pytest.approx(whole.series("norm"), rel=1e-5)


@pytest.mark.parametrize("stage", [0, 2])
def test_hosts_without_a_shared_folder(tmp_path, stage):
    """Each rank in a folder of its own, where -o is another for each: rank 0 writes for all, the same bytes as into a
    shared folder, and reads for all."""
    layout = ["-z", stage, "-b", 4, "--save-every", 2]
    whole = train_gpt(*flags(tmp_path, 6, *layout), ranks=3, out=tmp_path / "whole")
    apart = ["sh", "-c", 'mkdir -p host$OMPI_COMM_WORLD_RANK; cd host$OMPI_COMM_WORLD_RANK; exec "$@"', "_"]
    for steps in (4, 6):
        for killed in (".probe.0", "step_00000002/.probe.1") if steps == 6 else ():      # what a killed start leaves
            (tmp_path / "host0" / "run" / killed).write_text("")
        run = train_gpt(*flags(tmp_path, steps, *layout), "-o", "run", "--resume", "auto", ranks=3, wrapper=apart,
                        cwd=tmp_path)
        assert "-o run is not on all hosts" in run.out
    assert "step_00000004: step 4" in run.out
    assert not (tmp_path / "host1" / "run").exists() and not (tmp_path / "host2" / "run").exists()
    out = tmp_path / "host0" / "run"
    assert checkpoints(out) == ["step_00000002", "step_00000004", "step_00000006"] and not list(out.rglob(".probe*"))
    for path in out.glob("step_*/*"):
        assert saved_bytes(path) == saved_bytes(whole.folder / path.parent.name / path.name), path
    assert [entry["loss"] for entry in lines_of(out)] == whole.series("loss")


@pytest.mark.parametrize("damaged", [False, True])
def test_old_copy_on_another_host(tmp_path, damaged):
    """The second rank's host has a folder of the run's name, with another run's checkpoints: they are not read, and
    the first host's are not taken for damaged."""
    args = ["--save-every", 2]
    for host, seed in (0, 1), (1, 2):
        train_gpt(*flags(tmp_path, 4, *args, "-s", seed, "-b", 12), out=tmp_path / f"host{host}" / "run")
    if damaged:
        (tmp_path / "host1" / "run" / "step_00000004" / "state.json").unlink()
    apart = ["sh", "-c", 'cd host$OMPI_COMM_WORLD_RANK; exec "$@"', "_"]
    run = train_gpt(*flags(tmp_path, 6, *args, "-s", 1, "-b", 6, "-o", "run", "--resume", "auto"), ranks=2,
                    wrapper=apart, cwd=tmp_path)
    assert "step_00000004: step 4" in run.out and "-o run is not on all hosts" in run.out
    assert checkpoints(tmp_path / "host0" / "run") == ["step_00000002", "step_00000004", "step_00000006"]
    whole = train_gpt(*flags(tmp_path, 6, *args, "-s", 1, "-b", 12), out=tmp_path / "whole")
    losses = [entry["loss"] for entry in lines_of(tmp_path / "host0" / "run")]
    assert losses == pytest.approx(whole.series("loss"), rel=1e-6)


# ---- the rest ---------------------------------------------------------------------------------------------------
def test_background_and_keep(tmp_path, device):
    """A save is on disk steps after it was begun; --keep leaves the newest, --keep-every every so many steps'."""
    run = train_gpt(*flags(tmp_path, 12, "-b", 4, "--save-every", 4), device=device, out=tmp_path / "all")
    assert run.out.index("step 5/12") < run.out.index("saved " + str(run.checkpoint(4)))
    assert checkpoints(run.folder) == [f"step_{step:08d}" for step in (4, 8, 12)]
    run = train_gpt(*flags(tmp_path, 11, "-b", 4, "--save-every", 1, "--keep", 2, "--keep-every", 4), device=device,
                    out=tmp_path / "some")
    assert checkpoints(run.folder) == [f"step_{step:08d}" for step in (4, 8, 10, 11)]


def test_record_of_a_preset(tmp_path):
    """A folder that is called like the preset is another model; one called like a level is no path."""
    args = flags(tmp_path, 0)[3:]
    for name in ("d2", "block"):
        (tmp_path / name).mkdir()
    run = train_gpt("-m", "d2", *args, "-t", 8, "-r", "block", out=tmp_path / "run", cwd=tmp_path)
    arguments = json.loads((run.folder / "run.json").read_text())["arguments"]
    assert "--model=d2" in arguments and "--recompute=block" in arguments


def test_record_of_a_pattern(tmp_path):
    """Token shards named by a pattern are found from elsewhere too."""
    args = flags(tmp_path, 0)
    args[args.index("-d") + 1] = "data/*.bin"
    run = train_gpt(*args, out=tmp_path / "run", cwd=tmp_path)
    assert f"--data={tmp_path}/data/*.bin" in json.loads((run.folder / "run.json").read_text())["arguments"]


def test_tokenizer_stays(tmp_path):
    """Without -m it is that of the checkpoint, which may be set aside as damaged, or removed when it is not the newest
    any more."""
    args = flags(tmp_path, 2, "-b", 4, "--save-every", 1)
    tokenizer = tmp_path / "data" / "tokenizer.json"
    tokenizer.write_text('{"some": "tokenizer"}')
    run = train_gpt(*args, out=tmp_path / "run")
    tokenizer.unlink()
    (run.folder / "tokenizer.json").unlink()
    path = run.checkpoint(2) / "model.safetensors"
    flip(path, path.stat().st_size - 1)
    args = flags(tmp_path, 5, "-b", 4, "--save-every", 1, "--keep", 1)[3:]
    run = train_gpt("--resume", "auto", *args, out=run.folder)
    assert checkpoints(run.folder) == ["step_00000002.damaged", "step_00000005"]
    for folder in (run.folder, run.checkpoint(5)):
        assert (folder / "tokenizer.json").read_text() == '{"some": "tokenizer"}'


def test_later_checkpoints_are_not_overwritten(tmp_path, saved):
    folder, whole = saved
    shutil.copytree(whole.folder, tmp_path / "run")
    run = train_gpt("--resume", tmp_path / "run" / "step_00000002", *flags(folder, 6, "-b", 12)[3:],
                    out=tmp_path / "run", ok=False)
    assert run.code == 1 and "exists and is not overwritten" in run.complaint[0]
    assert checkpoints(tmp_path / "run") == checkpoints(whole.folder)


def test_repeat(tmp_path, device):
    """A run from its folder alone: moved, started from elsewhere, without the model's folder; the same bits."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2},
                                  "optimizer": {"type": "SGD", "params": {"momentum": 0.9, "nesterov": False}}}))
    # The three after the config as supervise.sh gives them.
    more = ["--config", config, "--resume", "auto", "--elastic", *in_rank_order(device)]
    whole = train_gpt(*flags(tmp_path, 5, *more), ranks=2, device=device, out=tmp_path / "run")
    losses, folder = whole.series("loss"), whole.folder.rename(tmp_path / "moved")
    record = json.loads((folder / "run.json").read_text())
    assert record["num_ranks"] == len(record["ranks"]) == 2 and record["version"] in whole.out
    assert "--zero=2" in record["arguments"] and f"--data={tmp_path / 'data'}" in record["arguments"]
    shutil.rmtree(tmp_path / "model")
    config.unlink()
    again = train_gpt("--repeat", folder, ranks=2, device=device, out=tmp_path / "again", cwd=tmp_path)
    assert "repeat  the same bits as the run" in again.out
    assert again.series("loss") == losses
    assert "the same bits" in train_gpt("--repeat", tmp_path / "again", ranks=2, device=device).out

    def refused(code, *words, args=(), ranks=2):
        run = train_gpt("--repeat", folder, *args, ranks=ranks, device=device, ok=False)
        assert run.code == code and all(word in run.complaint[0] for word in words), run.err

    refused(2, "--steps", args=["-n", 3])
    refused(2, "mpirun -np 2", ranks=3)
    shard_write(tmp_path / "data" / "train_000000.bin", init.tokens(4000, 97, 3), 97)
    refused(1, "4000 tokens", "5000")
    (folder / "run.json").unlink()
    refused(1, "run.json")


def test_changes_are_said(tmp_path):
    """Flags that shape the rest of a run take their new values; changes are printed, of these flags and no others."""
    run = train_gpt(*flags(tmp_path, 4, "--save-every", 2), out=tmp_path / "run")
    same = train_gpt(*flags(tmp_path, 4, "--resume", run.checkpoint(2)), out=tmp_path / "same")
    assert not re.search(r"^ +--\S+ is ", same.out, re.M)
    more = ["--clip", 0.5, "--weight-decay", 0.2, "--param-group", "*.bias:lr=0.5", "--spike-window", 50,
            "--log-every", 2]
    rest = train_gpt(*flags(tmp_path, 6, "--resume", run.checkpoint(2), *more), out=tmp_path / "rest")
    said = re.findall(r"^        --(\S+) is (\S+), was (\S*)$", rest.out, re.M)
    assert sorted(said) == [("clip", "0.5", "1"), ("param-group", "*.bias:lr=0.5", ""), ("spike-window", "50", "100"),
                            ("steps", "6", "4"), ("weight-decay", "0.2", "0.1")]


def test_seed_of_any_size(tmp_path):
    """The largest seed is whole in state.json (as text), run.json and the log; a number, as older versions wrote it, is
    read too."""
    seed, args = (1 << 63) - 1, flags(tmp_path, 4, "--save-every", 2)
    run = train_gpt(*args, "-s", seed, out=tmp_path / "run")
    state = json.loads((run.checkpoint(2) / "state.json").read_text())
    assert state["seed"] == str(seed)
    assert f"--seed={seed}" in json.loads((run.folder / "run.json").read_text())["arguments"]
    assert json.loads((run.folder / "log.jsonl").read_text().splitlines()[0])["run"]["seed"] == seed
    rest = train_gpt(*args, "-s", seed, "--resume", run.checkpoint(2), out=tmp_path / "rest")
    assert "--seed is" not in rest.out and rest.log[-1]["state_hash"] == run.log[-1]["state_hash"]
    state = {key: value for key, value in state.items() if key not in ("check", "files", "tensors")}
    state.update(format=1, seed=41)
    (run.checkpoint(2) / "state.json").write_text(json.dumps(state))
    other = train_gpt(*args, "-s", seed, "--resume", run.checkpoint(2), out=tmp_path / "other")
    assert f"--seed is {seed}, was 41" in other.out
