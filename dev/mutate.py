#!/usr/bin/env python3
"""mutate.py: does a test notice when synchronisation is missing? Each barrier, warp synchronisation, cp.async wait,
stream wait, event record, host wait and collective of the program is removed or misplaced in turn; a test must fail.

  dev/mutate.py                    all; prints each mutation with what noticed it, then the survivors
  dev/mutate.py --list             the mutations, and nothing is built
  dev/mutate.py --only attention   those whose file:line or text contains this

Works on the source text, in build/mutate. A mutated op is compiled alone with its own table of op tests, for the
checked emulator and then the plain one under several seeds; a mutated host file with train_gpt, which then trains a
tiny model in layouts that between them come by every line, and must print the losses and state hashes of the program
as it is.
Not mutated: SPARED, with the reason."""
import argparse
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import struct
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutate"
PRECISIONS = ["fp32", "bf16"]
PLAIN_SEEDS = [0, 1, 2, 3]
TIMEOUT_S = 60

# (regular expression, kind). Each match of a statement is one mutation "removed"; see also SWAPS.
STATEMENTS = [
    (r"__syncthreads\(\);", "barrier"),
    (r"__syncwarp\([^()]*\);", "warp synchronisation"),
    (r"cp_async_wait<\w+>\(\);", "cp.async wait"),
    (r"stream_wait\([^;]*\);", "stream wait"),
    (r"CUDA_CHECK\(\s*cudaStreamWaitEvent\([^;]*\)\);", "stream wait"),
    (r"CUDA_CHECK\(\s*cudaEventRecord\([^;]*\)\);", "event record"),
    (r"CUDA_CHECK\(\s*cuda(?:Stream|Event|Device)Synchronize\([^;]*\)\);", "host wait"),
    (r"NCCL_CHECK\(nccl(?:AllReduce|ReduceScatter|AllGather|Broadcast|Reduce|Send|Recv)\([^;]*\)\);", "collective"),
    (r"(?<!static void )comm_(?:all_reduce|reduce_scatter|all_gather|broadcast\w*|send|recv|barrier)\([^;{]*\);",
     "collective"),
]
# What can be misplaced and not only left out.
SWAPS = [
    (r"__syncthreads_(?:or|and|count)\((\w+)\)", r"(\1)", "barrier: no vote, no wait"),
    (r"cp_async_wait<(\w+)>\(\)", r"cp_async_wait<\1 + 1>()", "cp.async wait: for one group fewer"),
    (r"stream_wait\(([^,()]+), ([^,()]+), ", r"stream_wait(\2, \1, ", "stream wait: the other way round"),
    (r"cudaStreamWaitEvent\(([^,]+)->compute, ", r"cudaStreamWaitEvent(\1->reduce, ", "stream wait: wrong stream"),
    (r"cudaEventRecord\(([^;]+), ([\w.>-]+)(?:\.|->)reduce\)", r"cudaEventRecord(\1, \2->compute)",
     "event record: wrong stream"),
]
# A barrier behind the next statement, where that is one of memory: a call, or an element.
LATE = (r"(__sync(?:threads|warp)\(\);)(\s+)(?=\S)(?!#|(?:for|if|while|return|break|continue)\b|\w+ \w+\[[^\]]*\];)"
        r"([^;{}#]*[\[(][^;{}]*;)")
# "file: what is mutated" -> why nothing can show it.
SPARED = {
    "zero/stages.h: cudaEventRecord(z->grad_ring_free[k], z->reduce)":
        "at start-up: no stream has been given anything yet, so on any of them the event is complete at once",
    "zero/offload.h: cudaEventRecord(o->stored[k], o->d2h)": "the same",
    "zero/offload.h: cudaEventRecord(o->loaded[k], o->h2d)": "the same",
    "zero/stages.h: CUDA_CHECK(cudaStreamSynchronize(z->compute));":
        "after a copy to pageable memory, which is complete when the call returns",
}


@dataclasses.dataclass
class Mutation:
    file: str
    line: int
    kind: str
    before: str
    text: str                                # the whole file, mutated

    def __str__(self):
        return f"{self.file}:{self.line}: {self.kind}: {self.before}"


def code_of(text):
    """Comments and strings blanked, of the same length."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def sources():
    files = sorted((ROOT / "kernels").glob("*.cuh")) + sorted((ROOT / "zero").glob("*.h"))
    files = [f for f in files if f.name != "prim.cuh"]
    return files + sorted(ROOT.glob("*.cuh")) + [ROOT / "train_gpt.cu"]


def mutations():
    found = []
    for path in sources():
        text = path.read_text()
        code, name = code_of(text), str(path.relative_to(ROOT))

        def add(match, replacement, kind):
            line = code.count("\n", 0, match.start()) + 1
            before = " ".join(text[match.start():match.end()].split())
            if f"{name}: {before}" not in SPARED:
                mutated = text[:match.start()] + replacement + text[match.end():]
                found.append(Mutation(name, line, kind, before, mutated))

        for pattern, kind in STATEMENTS:
            for match in re.finditer(pattern, code):
                if not re.search(r"(static|inline) .*$", code[:match.start()].rsplit("\n", 1)[-1]):
                    add(match, ";", f"{kind} removed")
        for match in re.finditer(LATE, code):
            add(match, text[match.start(3):match.end(3)] + match[2] + match[1], "barrier behind the next statement")
        for pattern, replacement, kind in SWAPS:
            for match in re.finditer(pattern, code):
                if not re.search(r"(static|inline) .*$", code[:match.start()].rsplit("\n", 1)[-1]):
                    add(match, match.expand(replacement), kind)
    return sorted(found, key=lambda m: (m.file, m.line))


# ---- building ---------------------------------------------------------------------------------------------------
def make_value(name, checked):
    flags = ["DEVICE=emu"] + (["CHECK=1"] if checked else [])
    return subprocess.run(["make", "-s", *flags, f"print-{name}"], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout.split()


class Builder:
    def __init__(self):
        self.source = WORK / "source"
        shutil.rmtree(WORK, ignore_errors=True)
        self.source.mkdir(parents=True)
        names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True,
                               text=True, check=True).stdout.split("\n")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (self.source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.source / name)
        self.compile, self.link, self.objects = {}, {}, {}
        for checked in (True, False):
            objects = make_value("SUPPORT_OBJS", checked)
            flags = ["DEVICE=emu"] + (["CHECK=1"] if checked else [])
            subprocess.run(["make", "-s", *flags, *objects], cwd=ROOT, check=True)
            self.objects[checked] = [str(ROOT / o) for o in objects]
            self.compile[checked] = make_value("COMPILE", checked) + make_value("CHECKED", checked) + ["-w"]
            self.link[checked] = make_value("LINK", checked), make_value("LIBS", checked)

    def build(self, source, output, defines, checked):
        """None, or what the compiler said."""
        compiled = subprocess.run([*self.compile[checked], *defines, "-c", source, "-o", f"{output}.o"],
                                  cwd=self.source, capture_output=True, text=True)
        if compiled.returncode != 0:
            return compiled.stderr
        link, libs = self.link[checked]
        subprocess.run([*link, f"{output}.o", *self.objects[checked], "-o", output, *libs], cwd=self.source, check=True)
        return None


def environment(**extra):
    env = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMP_NUM_THREADS="1",
               OPENBLAS_NUM_THREADS="1", OMPI_MCA_mpi_yield_when_idle="1", EMU_HANG_S="10",
               OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_btl_vader_single_copy_mechanism="none")
    env.update({k: str(v) for k, v in extra.items()})
    return env


def run(command, **env):
    """Exit code and output; 124 when it took too long."""
    try:
        done = subprocess.run([str(c) for c in command], cwd=ROOT, env=environment(**env), capture_output=True,
                              text=True, errors="replace", timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        return 124, "too slow"


def complaint(output):
    for line in output.splitlines():
        if line.startswith(("train_gpt:", "FAIL")):
            return line[:140]
    return (output.splitlines() or ["no output"])[-1][:140]


# ---- ops --------------------------------------------------------------------------------------------------------
def op_files():
    return [f.stem for f in sorted((ROOT / "kernels").glob("*.cuh")) if f"OpTest {f.stem}_tests[]" in f.read_text()]


def ops_that_test(mutation):
    """The op files whose tables come by this line: its own, those that include it by name, or those that use a function
    of a shared header."""
    own = pathlib.Path(mutation.file)
    if own.stem in op_files():
        return [own.stem]
    if own.name != "vec.cuh":
        return [op for op in op_files() if f'"{own.name}"' in (ROOT / "kernels" / f"{op}.cuh").read_text()]
    functions = set(re.findall(r"\b(\w+)\(", mutation.text)) & {"block_sum", "block_max"}
    users = [op for op in op_files()
             if any(f"{name}(" in (ROOT / "kernels" / f"{op}.cuh").read_text() for name in functions)]
    return users or op_files()


def op_program(builder, op):
    path = builder.source / f"mutated_{op}.cu"
    init = ("matmul_init();", "matmul_free();") if op == "matmul" else ("", "")
    path.write_text(f"""#define OP_TESTS
#include "kernels/optest.h"
#include "kernels/{op}.cuh"
int main()
{{
    OpTotals totals = {{}};
    {init[0]}
    op_table({op}_tests, "", false, 0, &totals);
    {init[1]}
    return totals.num_failed != 0;
}}
""")
    return path


def try_op(builder, mutation):
    """What noticed, or None."""
    precisions = PRECISIONS[::-1] if "mma" in mutation.file else PRECISIONS
    for checked in (True, False):
        for op in ops_that_test(mutation):
            for precision in precisions:
                output = WORK / f"op_{'check' if checked else 'emu'}"
                error = builder.build(op_program(builder, op), output, ["-O1", f"-DPREC_{precision.upper()}"], checked)
                if error:
                    return f"does not compile: {error.splitlines()[0]}"
                for seed in [0] if checked else PLAIN_SEEDS:
                    code, text = run([output], EMU_SEED=seed)
                    if code != 0:
                        return f"{op} {precision}, {'checked' if checked else 'plain'}, seed {seed}: {complaint(text)}"
    return None


# ---- the program ------------------------------------------------------------------------------------------------
def shard_write(path, num_toks, seed):
    """llm.c's format; only the standard library, since this runs wherever the emulator builds."""
    generator, toks = random.Random(seed), [0]
    for _ in range(num_toks - 1):            # a token mostly follows from the last: something can be learned
        toks.append((5 * toks[-1] + 1) % 97 if generator.random() < 0.7 else generator.randrange(97))
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack("<5i251i", 20240520, 1, num_toks, 0, 97, *[0] * 251)
    path.write_bytes(header + struct.pack(f"<{num_toks}H", *toks))


def prepare_data():
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 97, "n_positions": 16,
              "n_embd": 16, "n_layer": 4, "n_head": 2, "activation_function": "gelu_new",
              "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    (WORK / "model").mkdir(parents=True, exist_ok=True)
    (WORK / "model" / "config.json").write_text(json.dumps(config))
    shard_write(WORK / "data" / "train_000000.bin", 3000, 3)
    shard_write(WORK / "data" / "val_000000.bin", 200, 4)


BASE = ["-m", WORK / "model", "--from-scratch", "-d", WORK / "data", "-t", 16, "-l", 1e-3, "--hash-every", 1,
        "--sample-tokens", 0]
# Name, precision, ranks, flags. "resumed": run again from its checkpoint, with more steps.
LAYOUTS = [
    ("stage 2", "fp32", 2, ["-z", 2, "-b", 1, "-g", 2, "-n", 3, "--eval-every", 2, "-v", WORK / "data"]),
    ("stage 3", "fp32", 2, ["-z", 3, "-b", 1, "-g", 2, "-n", 3, "--reduce-bucket", 1]),
    ("stage 3, in order", "fp32", 2, ["-z", 3, "-b", 1, "-g", 1, "-n", 2, "-r", 2, "--deterministic"]),
    ("stage 1", "fp32", 2, ["-z", 1, "-b", 1, "-g", 2, "-n", 3]),
    ("stage 0", "fp32", 2, ["-z", 0, "-b", 1, "-g", 2, "-n", 3]),
    ("stage 2, resumed", "fp32", 2, ["-z", 2, "-b", 1, "-g", 1, "-n", 2, "--save-every", 1]),
    ("one rank", "fp32", 1, ["-z", 0, "-b", 2, "-g", 2, "-n", 4, "-r", "block", "--offload", "activations"]),
    ("stage 3, resumed", "bf16", 2, ["-z", 3, "-b", 1, "-g", 1, "-n", 2, "--save-every", 1]),
]


def train(program, layout, checked, seed):
    """Exit code, output, and what must be the same: steps of the run log without times."""
    name, precision, ranks, flags = layout
    resumes = "resumed" in name
    out = WORK / "run"
    shutil.rmtree(out, ignore_errors=True)
    command = ["mpirun", "-np", ranks, program] if ranks > 1 else [program]
    env = {"EMU_SEED": seed}
    if checked and resumes:
        env["EMU_SLOW_RANK"] = 1
    code, text = run([*command, *BASE, *flags, "-p", precision, "-o", out], **env)
    if code == 0 and resumes:
        flags = [4 if flags[i - 1] == "-n" else flag for i, flag in enumerate(flags)]
        base = [flag for flag in BASE if flag != "--from-scratch"]
        code, more = run([*command, *base, *flags, "-p", precision, "-o", out, "--resume", "auto"], **env)
        text += more
    steps = []
    for log in sorted(out.glob("*.jsonl")):
        for line in log.read_text().splitlines():
            entry = json.loads(line)
            steps.append([entry.get(key) for key in ("step", "loss", "norm", "lr", "val_loss", "state_hash")])
    return code, text, steps


def build_program(builder, precision, checked):
    output = WORK / f"train_gpt_{'check' if checked else 'emu'}_{precision}"
    defines = ["-O0", f"-DPREC_{precision.upper()}", "-DPREC_MAIN", f"-DHAVE_{precision.upper()}"]
    return output, builder.build("train_gpt.cu", output, defines, checked)


def try_program(builder, mutation, wanted):
    layouts = LAYOUTS
    if "checkpoint" in mutation.file:        # what comes by the line first
        layouts = sorted(LAYOUTS, key=lambda layout: "resumed" not in layout[0])
    for checked in (True, False):
        programs = {}
        for layout in layouts:
            name, precision = layout[:2]
            if precision not in programs:
                programs[precision], error = build_program(builder, precision, checked)
                if error:
                    return f"does not compile: {error.splitlines()[0]}"
            for seed in [0] if checked else PLAIN_SEEDS[1:3]:
                code, text, steps = train(programs[precision], layout, checked, seed)
                where = f"{name} {precision}, {'checked' if checked else 'plain'}, seed {seed}"
                if code != 0:
                    return f"{where}: {complaint(text)}"
                if steps != wanted[name]:
                    return f"{where}: other losses or hashes"
    return None


def unmutated(builder):
    """What each layout gives as it is: the checked program and the plain one agree."""
    wanted = {}
    for checked in (True, False):
        for precision in PRECISIONS:
            output, error = build_program(builder, precision, checked)
            assert error is None, error
            for layout in LAYOUTS:
                if layout[1] != precision:
                    continue
                code, text, steps = train(output, layout, checked, 0 if checked else 1)
                assert code == 0, f"{layout[0]} fails as it is: {text[-2000:]}"
                assert steps and steps == wanted.setdefault(layout[0], steps), f"{layout[0]}: checked and plain differ"
    return wanted


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutations only")
    parser.add_argument("--only", default="", help="those whose file:line or text contains this")
    options = parser.parse_args()
    chosen = [m for m in mutations() if options.only in str(m)]
    if options.list:
        print("\n".join(map(str, chosen)))
        return 0
    builder, wanted, survivors, start = Builder(), None, [], time.time()
    prepare_data()
    for mutation in chosen:
        began = time.time()
        path = builder.source / mutation.file
        original = path.read_text()
        is_op = mutation.file.startswith("kernels/")
        if not is_op and wanted is None:
            wanted = unmutated(builder)
            began = time.time()
        path.write_text(mutation.text)
        noticed = try_op(builder, mutation) if is_op else try_program(builder, mutation, wanted)
        path.write_text(original)
        print(f"{'noticed ' if noticed else 'SURVIVES'} {time.time() - began:5.1f} s  {mutation}\n"
              f"                    {noticed or 'no test fails'}", flush=True)
        if not noticed:
            survivors.append(mutation)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations noticed in {time.time() - start:.0f} s")
    for mutation in survivors:
        print(f"survivor: {mutation}")
    for what, why in SPARED.items():
        print(f"spared: {what}: {why}")
    print(f"{len(chosen) - len(survivors)} passed, {len(survivors)} failed")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
