#!/usr/bin/env python3
"""mutate.py: does a test fail when synchronization is missing? Each barrier, warp synchronization, cp.async wait,
stream wait, event record, host wait and collective of the program is removed or misplaced in turn; a test must fail.

  dev/mutate.py                    all; prints each mutation with the test that found it, then the survivors
  dev/mutate.py --list             lists the mutations, builds nothing
  dev/mutate.py --only attention   those whose file:line or text matches this regular expression
  dev/mutate.py --log FILE         also writes to FILE (build/mutations.log); of an older FILE the tests that found a
                                   mutation run first

All mutations are compiled at once, into a copy of the tree in build/mutate: each is guarded by `if (mutant(17))`, and
an environment variable selects one. First every test runs without a mutation, which gives its time and the mutations
that it executes; then each mutation runs the tests that execute it, the shortest first, until one fails. Tests are the
rows of the op tests, and runs of train_gpt with a tiny model in the layouts of TESTS, which must give the losses, state
hashes and files of the unchanged program; first in the emulator with memory checker, then in the plain one with several
seeds. A test that takes too long proves nothing: such a mutation is UNSURE, which counts as a failure.
Not mutated: SPARED, with the reason."""
import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutate"
TREE = WORK / "tree"
PRECISIONS = ["fp32", "bf16"]
CHECKED_SEEDS = [0, 1]       # and the rank that is slow
PLAIN_SEEDS = [1, 2, 3]

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
    (r"MPI_CHECK\(MPI_(?:Bcast|I?[Bb]arrier|Allreduce|Allgather\w*|Gather\w*)\([^;]*\)\);", "collective"),
    (r"(?<!static void )comm_(?:all_reduce|reduce_scatter|all_gather|broadcast\w*|send|receive|barrier\w*)"
     r"\([^;{]*\);", "collective"),
]
# Statements that can also be misplaced.
SWAPS = [
    (r"__syncthreads_(?:or|and|count)\((\w+)\)", r"(\1)", "barrier: no vote, no wait"),
    (r"cp_async_wait<(\w+)>\(\)", r"cp_async_wait<\1 + 1>()", "cp.async wait: for one group fewer"),
    (r"stream_wait\(([^,()]+), ([^,()]+), ", r"stream_wait(\2, \1, ", "stream wait: the other way round"),
    (r"cudaStreamWaitEvent\(z->compute, ", r"cudaStreamWaitEvent(z->reduce, ", "stream wait: wrong stream"),
    (r"cudaStreamWaitEvent\(o->compute, ", r"cudaStreamWaitEvent(o->d2h, ", "stream wait: wrong stream"),
    (r"cudaEventRecord\(([^;]+), ([\w.>-]+)(?:\.|->)reduce\)", r"cudaEventRecord(\1, \2->compute)",
     "event record: wrong stream"),
]
# A barrier behind the next statement, where that is one of memory: a call, or an element.
LATE = (r"(__sync(?:threads|warp)\(\);)(\s+)(?=\S)(?!#|(?:for|if|else|while|return|break|continue)\b|"
        r"\w+ \w+\[[^\]]*\];)([^;{}#]*[\[(][^;{}]*;)")
PAGEABLE = "after a copy to pageable memory, which is complete when the call returns"
TOGETHER = "ranks begin to be timed together, with nothing under way: without it only times are others"
# "file: statement" or "file: statement: kind" -> why no test can find the mutation.
SPARED = {
    "zero/memory.h: CUDA_CHECK(cudaEventRecord(z->grad_buffer_free[k], z->reduce));: event record: wrong stream":
        "at start-up: no stream has been given anything yet, so on any of them the event is complete at once",
    "zero/offload.h: CUDA_CHECK(cudaEventRecord(o->stored[k], o->d2h));: event record: wrong stream": "the same",
    "zero/offload.h: CUDA_CHECK(cudaEventRecord(o->loaded[k], o->h2d));: event record: wrong stream": "the same",
    "zero/memory.h: CUDA_CHECK(cudaEventRecord(z->states_copied, z->d2h));: event record: wrong stream": "the same",
    "zero/stages.h: CUDA_CHECK(cudaStreamSynchronize(z->compute));": PAGEABLE,
    "zero/account.h: CUDA_CHECK(cudaStreamSynchronize(z->compute));": PAGEABLE,
    "run/evaluate.cuh: CUDA_CHECK(cudaStreamSynchronize(z->compute));": PAGEABLE,
    "model/choices.cuh: CUDA_CHECK(cudaStreamSynchronize(stream));": PAGEABLE,
    "model/choices.cuh: CUDA_CHECK(cudaStreamSynchronize(m->zero->compute));": PAGEABLE,
    "zero/plan.h: CUDA_CHECK(cudaDeviceSynchronize());":
        "a copy from pageable memory on the same stream follows, and waits for it; in --bench none does",
    "run/bench.cuh: comm_barrier(&run->comm);: collective removed": TOGETHER,
    "run/start.cuh: comm_barrier(&run->comm);: collective removed":
        "without it a rank may find less free memory, by what another has pinned already",
    "run/trace.cuh: comm_barrier(&run->comm);: collective removed": TOGETHER,
    "run/trace.cuh: CUDA_CHECK(cudaDeviceSynchronize());": TOGETHER,
    "train_gpt.cu: comm_barrier_idle(&run->comm);: collective removed":
        "ranks that have no part in a text would wait for its end in MPI_Finalize: the same, but spinning",
    "run/evaluate.cuh: comm_barrier_idle(&run->comm);: collective removed": "the same",
}


class Mutation:
    def __init__(self, number, file, line, kind, before):
        self.number, self.file, self.line, self.kind, self.before = number, file, line, kind, before
        self.spared = SPARED.get(f"{file}: {before}: {kind}", SPARED.get(f"{file}: {before}"))

    def __str__(self):
        return f"{self.file}:{self.line}: {self.kind}: {self.before}"


# ---- the source with all mutations in it ------------------------------------------------------------------------
def code_of(text):
    """Comments and strings blanked, of the same length."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def sources():
    files = sorted((ROOT / "kernels").glob("*.cuh")) + sorted((ROOT / "zero").glob("*.h"))
    files = [f for f in files if f.name != "prim.cuh"]
    for folder in ("model", "run"):
        files += sorted((ROOT / folder).glob("*.cuh"))
    return files + [ROOT / "train_gpt.cu"]


def mutate(path, found):
    """The text of a file with its mutations, no line moved; adds them to `found`."""
    text, name = path.read_text(), str(path.relative_to(ROOT))
    code, edits, sites = code_of(text), [], {}

    def mutation(match, kind):
        before = " ".join(text[match.start():match.end()].split())
        found.append(Mutation(len(found) + 1, name, code.count("\n", 0, match.start()) + 1, kind, before))
        return f"mutant({found[-1].number})"

    def matches(pattern):
        for match in re.finditer(pattern, code):
            if not re.search(r"(static|inline) .*$", code[:match.start()].rsplit("\n", 1)[-1]):
                yield match

    for pattern, kind in STATEMENTS:
        for match in matches(pattern):
            if not any(start <= match.start() < site["end"] for start, site in sites.items()):
                sites[match.start()] = {"match": match, "end": match.end(), "kind": kind, "late": None, "swaps": []}
    for match in re.finditer(LATE, code):
        sites[match.start()]["late"] = match
    for pattern, replacement, kind in SWAPS:
        for match in matches(pattern):
            start = max((s for s in sites if s <= match.start() < sites[s]["end"]), default=None)
            if start is None:                # a part of an expression
                condition = mutation(match, kind)
                edits.append((match.start(), match.end(), f"({condition} ? {match.expand(replacement)} : {match[0]})"))
            else:
                at, end = match.start() - start, match.end() - start
                whole = text[start:sites[start]["end"]]
                sites[start]["swaps"].append((kind, whole[:at] + match.expand(replacement) + whole[end:]))
    for start, site in sites.items():
        match, statement = site["match"], text[start:site["end"]]
        off = [mutation(match, site["kind"] + " removed")]
        if site["kind"] == "collective":
            off.append(mutation(match, "collective: one rank stays away") + " && mutant_rank()")
        one_line = " ".join(statement.split("\n"))
        swaps = "".join(f"if ({mutation(match, kind)}) {' '.join(swap.split())} else "
                        for kind, swap in site["swaps"])
        if site["late"] is not None:
            late = mutation(match, "barrier behind the next statement")
            off.append(late)
            edits.append((site["late"].end(), site["late"].end(), f" if ({late}) {one_line}"))
        edits.append((start, site["end"], f"{{ {swaps}if (!({' || '.join(off)})) {statement} }}"))
    # Insertions go after what ends at the same position.
    for start, end, replacement in sorted(edits, key=lambda e: (e[0], e[1] == e[0]), reverse=True):
        text = text[:start] + replacement + text[end:]
    return text


MUTANT_H = r"""#pragma once
bool mutant(int number);     // is it the one that MUTANT names? Noted in the file that MUTANT_SEEN names.
bool mutant_rank(void);      // the one rank that stays away
void mutant_forget(void);
bool mutant_was_seen(int number);
"""
MUTANT_CPP = r"""
#include "mutant.h"
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
static const int MOST = 1 << 16;
static char* map_seen(void)
{
    const char* name = getenv("MUTANT_SEEN");
    int fd = name != nullptr ? open(name, O_RDWR) : -1;
    void* p = mmap(nullptr, MOST, PROT_READ | PROT_WRITE, fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
    if (p == MAP_FAILED) abort();
    return (char*)p;
}
static char* seen = map_seen();
static const int chosen = getenv("MUTANT") != nullptr ? atoi(getenv("MUTANT")) : 0;
static const bool is_away = getenv("OMPI_COMM_WORLD_RANK") != nullptr && atoi(getenv("OMPI_COMM_WORLD_RANK")) == 1;
bool mutant(int number) { return seen[number] = 1, number == chosen; }
bool mutant_rank(void) { return is_away; }
void mutant_forget(void) { memset(seen, 0, MOST); }
bool mutant_was_seen(int number) { return seen[number] != 0; }
"""
OPS_CU = r"""
/* One row of the tables after another: without arguments each with its time and the mutations it comes by, with a list
 * of numbers until one fails. */
#define OP_TESTS
INCLUDES
static OpTotals totals;
static void row_run(const OpTest* test, int row, int argc, char** argv)
{
    bool asked = argc == 1;
    for (int i = 1; i < argc; i++) asked = asked || atoi(argv[i]) == row;
    if (!asked) return;
    mutant_forget();
    double start_s = op_now_s();
    op_test_row(test, false, 0, &totals);
    if (totals.num_failed > 0) exit(1);
    if (argc > 1) return;
    printf("row %d %f", row, op_now_s() - start_s);
    for (int k = 1; k < 1 << 16; k++) if (mutant_was_seen(k)) printf(" %d", k);
    printf("\n");
}
int main(int argc, char** argv)
{
    int row = 0;
    matmul_init();
TABLES
    matmul_free();
}
"""


def write_tree():
    """The copy of the tree, with every mutation."""
    shutil.rmtree(WORK, ignore_errors=True)
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                           check=True).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, TREE / name)
    found = []
    for path in sources():
        (TREE / path.relative_to(ROOT)).write_text(mutate(path, found))
    (TREE / "mutant.h").write_text(MUTANT_H)
    runtime = TREE / "kernels/cpu/runtime.cpp"
    runtime.write_text(runtime.read_text() + MUTANT_CPP)
    op_tests = (ROOT / "test/test_ops.cu").read_text()
    includes = "\n".join(re.findall(r'^#include "(?!test_emu).*$', op_tests, re.M))
    tables = "\n".join(f"    for (const OpTest& test : {table}) row_run(&test, row++, argc, argv);"
                       for table in re.findall(r"op_table\((\w+),", op_tests))
    (TREE / "test/test_ops.cu").write_text(OPS_CU.replace("INCLUDES", includes).replace("TABLES", tables))
    return found


def build():
    jobs = []
    for checked in (True, False):
        folder = f"build/{'check' if checked else 'emu'}"
        jobs.append(["make", "-s", "DEVICE=emu", *(["CHECK=1"] if checked else []), f"PREC={' '.join(PRECISIONS)}",
                     f"CXX=g++ -include {TREE}/mutant.h -w", f"{folder}/train_gpt",
                     *(f"{folder}/test_ops.{precision}" for precision in PRECISIONS)])
    for job in jobs:
        subprocess.run(job, cwd=TREE, check=True)


# ---- running ----------------------------------------------------------------------------------------------------
def run(command, folder, limit_s, **env):
    """Exit code and output; 124 when it took longer than limit_s, and all of its processes are gone."""
    env = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMP_NUM_THREADS="1",
               OPENBLAS_NUM_THREADS="1", OMPI_MCA_mpi_yield_when_idle="1", TMPDIR=str(folder),
               OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_btl_vader_single_copy_mechanism="none",
               **{k: str(v) for k, v in env.items()})
    with open(folder / "output", "w+", errors="replace") as output:
        process = subprocess.Popen([str(c) for c in command], cwd=folder, env=env, stdout=output,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, process_group=0)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = 124
            os.killpg(process.pid, signal.SIGTERM)           # mpirun takes its ranks along
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read()


def parsed(text):
    """A JSON object; empty if a mutation has made it invalid."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


HANGS = "it hangs"              # a busy machine may look the same: no proof


def complaint(code, output):
    if code == 124 or "waits longer than --timeout" in output:
        return HANGS
    for line in output.splitlines():
        if line.startswith(("train_gpt:", "FAIL")) or "An error occurred" in line:
            return line[:140]
    return f"exit {code}: " + (output.splitlines() or ["no output"])[-1][:120]


class OpRows:
    """Rows of one precision's op tests."""

    def __init__(self, precision, **env):
        self.name, self.precision, self.env, self.rows = f"op tests {precision}", precision, env, {}

    def program(self, checked):
        return TREE / f"build/{'check' if checked else 'emu'}/test_ops.{self.precision}"

    def measure(self, folder):
        code, output = run([self.program(True)], folder, 3600, **self.env)
        assert code == 0, f"{self.name} fail as they are: {output[-2000:]}"
        for row, seconds, seen in re.findall(r"^row (\d+) ([\d.]+)((?: \d+)*)$", output, re.M):
            self.rows[row] = float(seconds), set(map(int, seen.split()))

    def seconds(self, number):
        return min((seconds for seconds, seen in self.rows.values() if number in seen), default=None)

    def notices(self, number, checked, seed, folder):
        rows = sorted((seconds, row) for row, (seconds, seen) in self.rows.items() if number in seen)
        command = [self.program(checked), *(row for _, row in rows)]
        limit_s = 60 + 10 * sum(seconds for seconds, _ in rows)
        code, output = run(command, folder, limit_s, MUTANT=number, EMU_SEED=seed, **self.env)
        return complaint(code, output) if code != 0 else None


def shard_write(path, num_toks, V, seed):
    """llm.c's format; only the standard library, since this runs wherever the emulator builds."""
    generator, toks = random.Random(seed), [0]
    for _ in range(num_toks - 1):            # a token is mostly determined by the last one, so the model can learn
        toks.append((5 * toks[-1] + 1) % V if generator.random() < 0.7 else generator.randrange(V))
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack("<5i251i", 20240520, 1, num_toks, 0, V, *[0] * 251)
    path.write_bytes(header + struct.pack(f"<{num_toks}H", *toks))


def prepare_data():
    """A model of four blocks, and a byte tokenizer with 97 tokens, so that it can generate text."""
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 97, "n_positions": 16,
              "n_embd": 16, "n_layer": 4, "n_head": 2, "activation_function": "gelu_new",
              "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
              "eos_token_id": list(range(0, 97, 7))}         # so that texts have different lengths
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    letters = [chr(33 + i) for i in range(94)] + ["\u0120", "\u010a", "\u0109"]
    tokenizer = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": level, "decoder": level,
                 "post_processor": None, "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate(letters)},
                                                   "merges": []}}
    (WORK / "model").mkdir(parents=True, exist_ok=True)
    (WORK / "model" / "config.json").write_text(json.dumps(config))
    (WORK / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    shard_write(WORK / "data" / "train_000000.bin", 3000, 97, 3)
    shard_write(WORK / "data" / "val_000000.bin", 200, 97, 4)
    config = dict(config, n_embd=128)        # 3 MB of weights, twice that of moments
    (WORK / "wide").mkdir(parents=True, exist_ok=True)
    (WORK / "wide" / "config.json").write_text(json.dumps(config))
    lines = [{"ctx": "abc", "endings": ["de", "xyz"], "label": 0}, {"ctx": "Q", "endings": ["1", "2"], "label": 1}]
    (WORK / "choices.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [{"ctx": "abcdef", "endings": ["ghijk"] * 4, "label": 0}, lines[1]] * 40    # all the work is rank 0's
    (WORK / "uneven.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [{"ids": [1, 6, 31]}, {"ids": [2]}, {"ids": [3, 16], "temperature": 1.0}]
    (WORK / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


FLAGS = ["--from-scratch", "-d", WORK / "data", "-t", 16, "-o", "run"]
TRAIN = ["-m", WORK / "model", *FLAGS, "--timeout", 20, "--hash-every", 1]
RESUME = [flag for flag in TRAIN if flag != "--from-scratch"] + ["--resume", "auto"]
QUIET = ["--sample-tokens", 0]
MUON = ["--optimizer", "muon"]
ASK = ["-m", "run/step_00000002", "--timeout", 20]
SHORT = ["--timeout", 1.5]


class Programs:
    """train_gpt with one list of flags after another, in an empty folder. refused: the message of the last; other: more
    flags of all ranks but the first; before: commands of their shell; timed: tests that --timeout does not end a rank
    that waits for work."""

    def __init__(self, name, precision, ranks, *runs, refused=None, other=(), before=None, timed=False, **env):
        self.name, self.precision, self.ranks, self.runs = f"{name}, {precision}", precision, ranks, runs
        self.refused, self.other, self.timed, self.env = refused, other, timed, env
        self.wrapper = ["bash", "-c", f'{before}; exec "$@"', "_"] if before else []
        self.took_s, self.seen, self.wanted = None, set(), None

    def attempt(self, checked, seed, folder, limit_s, **env):
        """Exit code, output, and results that must be equal."""
        program = TREE / f"build/{'check' if checked else 'emu'}/train_gpt"
        for made in "run", "cache":
            shutil.rmtree(folder / made, ignore_errors=True)
        output, results = "", []
        for flags in self.runs:
            command = [program, *flags, "-p", self.precision, "--verbose"]
            if self.ranks > 1:
                others = [*self.wrapper, *command, *self.other]
                command = ["mpirun", "-np", 1, *command, ":", "-np", self.ranks - 1, *others]
            code, output = run(command, folder, limit_s, EMU_SEED=seed, XDG_CACHE_HOME=folder / "cache", **self.env,
                               **env)
            if code == 1 and self.refused and flags is self.runs[-1]:
                return 0, output, re.findall(self.refused, output)[:1]
            if code != 0:
                return code, output, None
            results += [re.sub(r'(,"first_token_ms| \| [\d.]+ ms waited).*', "", line) for line in output.splitlines()
                        if re.match(r'val |\{"index|choices |sent ', line)]
        for path in sorted((folder / "run").rglob("*")):
            if path.name == "run.json":      # it has the time
                results.append(parsed(path.read_text(errors="replace")).get("ranks"))
            elif path.suffix in (".safetensors", ".json") and path.name != "trace.json":     # it has times
                results.append([str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest()])
            if path.suffix == ".jsonl":
                for entry in map(parsed, path.read_text(errors="replace").splitlines()):
                    results.append([entry.get(k) for k in ("step", "loss", "norm", "lr", "val_loss", "state_hash")])
        if (folder / "run/export").exists():     # written last
            written = [(folder / "run/export" / n).stat().st_mtime_ns for n in ("model.safetensors", "config.json")]
            results.append(written == sorted(written))
        return 0, output, results

    def measure(self, folder):
        seen = folder / "seen"
        seen.write_bytes(bytes(1 << 16))
        start = time.time()
        code, output, self.wanted = self.attempt(True, 0, folder, 900, MUTANT_SEEN=seen)
        self.took_s = time.time() - start
        assert code == 0, f"{self.name} fails as it is: {output[-2000:]}"
        self.seen = {i for i, byte in enumerate(seen.read_bytes()) if byte}
        code, output, plain = self.attempt(False, 1, folder, 900)
        assert code == 0 and plain == self.wanted, f"{self.name}: the plain build differs: {output[-2000:]}"

    def seconds(self, number):
        return self.took_s if number in self.seen else None

    def notices(self, number, checked, seed, folder):
        env = {"EMU_SLOW_RANK": seed % 2} if checked and self.ranks > 1 else {}
        code, output, results = self.attempt(checked, seed, folder, 30 + 5 * self.took_s, MUTANT=number, **env)
        if code != 0 and self.timed and "waits longer than --timeout" in output:
            code, _, results = self.attempt(checked, seed, folder, 30 + 5 * self.took_s, **env)
            return "a rank without work is ended" if code == 0 and results == self.wanted else HANGS
        if code != 0:
            return complaint(code, output)
        return "other numbers" if results != self.wanted else None


# Together they execute every line.
TESTS = [
    *(OpRows(precision) for precision in PRECISIONS), OpRows("fp32", EMU_NO_EPILOGUE=1),
    Programs("one rank", "fp32", 1, [*TRAIN, "-z", 0, "-b", 2, "-g", 2, "-n", 3, *QUIET, "-r", "block", "--offload",
              "activations"]),
    Programs("stage 0", "fp32", 2, [*TRAIN, "-z", 0, "-b", 1, "-g", 2, "-n", 2, *QUIET]),
    Programs("stage 0, in order", "fp32", 2, [*TRAIN, "-z", 0, "-b", 1, "-n", 2, "--deterministic", *QUIET]),
    Programs("flags that differ", "fp32", 2, [*TRAIN, "-z", 1, "-b", 1, "-n", 1, *QUIET], other=["-s", 5],
             refused=r"rank 1 differs from rank 0 in the flags"),
    Programs("a flipped bit", "fp32", 2, [*TRAIN, "-z", 2, "-b", 1, "-n", 3, "--check-replicas", 1, *QUIET],
             refused=r"after step 2 rank 1 holds other parameters", TRAIN_GPT_CORRUPT_GATHER="1:15"),
    Programs("no room for one rank", "fp32", 2, ["-m", WORK / "wide", *FLAGS, "-z", 1, "-b", 1, "-n", 1, *QUIET],
             refused=r"rank 0: \S+ is not saved: .*?;", before="ulimit -f 4500"),
    Programs("long choices", "fp32", 2, [*TRAIN, "-z", 1, "-b", 1, "-n", 2, *QUIET],
             [*ASK[:2], *SHORT, "--choices", WORK / "uneven.jsonl", "-b", 2], timed=True),
    Programs("stage 1", "fp32", 2, [*TRAIN, "-z", 1, "-b", 1, "-g", 2, "-n", 2, "--check-replicas", 1, *QUIET]),
    Programs("not finite", "fp32", 2, [*TRAIN, "-z", 1, "-b", 1, "-n", 25, "-l", 1000, "--weight-decay", 100,
             "--warmup", 0, *QUIET],
             refused=r"the first that is not finite is [\w. ]+"),
    Programs("stage 2", "fp32", 2, [*TRAIN, "-z", 2, "-b", 1, "-g", 2, "-n", 3, "--eval-every", 2, *QUIET]),
    Programs("stage 3", "fp32", 2, [*TRAIN, "-z", 3, "-b", 1, "-g", 2, "-n", 3, "--reduce-bucket", 1, *QUIET]),
    Programs("stage 2, no hash", "fp32", 2, ["-m", WORK / "model", *FLAGS, "-z", 2, "-b", 1, "-g", 2, "-n", 4, *QUIET]),
    Programs("stage 3, no hash", "fp32", 2, ["-m", WORK / "model", *FLAGS, "-z", 3, "-b", 1, "-g", 2, "-n", 4, *QUIET]),
    Programs("stage 3, in order", "fp32", 2, [*TRAIN, "-z", 3, "-b", 1, "-n", 2, "-r", 2, "--deterministic", *QUIET]),
    Programs("stage 2, resumed", "fp32", 2, [*TRAIN, "-z", 2, "-b", 1, "-n", 2, "--save-every", 1, *QUIET],
             [*RESUME, "-z", 2, "-b", 1, "-n", 4, *QUIET]),
    Programs("stage 2, no shared folder", "fp32", 2, [*TRAIN, "-z", 2, "-b", 1, "-n", 2, "--save-every", 1, *QUIET],
             [*RESUME, "-z", 2, "-b", 2, "-n", 4, "--elastic", *QUIET], before="mkdir -p apart; cd apart"),
    Programs("offload", "fp32", 2, [*TRAIN, "-z", 2, "-b", 1, "-g", 2, "-n", 2, "-r", "block",
                                    "--offload", "activations", *QUIET]),
    Programs("host memory", "fp32", 2, [*TRAIN, "-z", 3, "-b", 1, "-g", 2, "-n", 3, "--offload",
                                        "optimizer,gradients,parameters", *QUIET]),
    Programs("muon", "fp32", 2, [*TRAIN, *MUON, "-z", 2, "-b", 1, "-n", 2, *QUIET]),
    Programs("lamb", "fp32", 2, [*TRAIN, "-z", 3, "-b", 1, "-n", 2, "--optimizer", "lamb", *QUIET]),
    Programs("stage 3, resumed", "bf16", 2, [*TRAIN, "-z", 3, "-b", 1, "-n", 2, "--save-every", 1, *QUIET],
             [*RESUME, "-z", 3, "-b", 1, "-n", 4, *QUIET]),
    Programs("fp32 tensors", "bf16", 2, [*TRAIN, "-z", 2, "-b", 1, "-n", 3, "--fp32-tensors", "wte,ln_1", *QUIET]),
    Programs("timed", "fp32", 2, ["-m", WORK / "model", "--from-scratch", "-t", 16, "-z", 2, "-b", 1, "-n", 2,
                                  "--bench", "--timeout", 20]),
    Programs("traced", "fp32", 2, [*TRAIN, "-z", 1, "-b", 1, "-n", 6, "--profile", 1, *QUIET]),
    *(Programs(f"tuned, stage {stage}", "fp32", 2, [*TRAIN, *MUON, "-z", stage, "-b", 1, "-n", 2, "--tune", *QUIET],
               [*RESUME, *MUON, "-z", stage, "-b", 1, "-n", 4, *QUIET],
               before="export EMU_FAST_ALGO=2 EMU_FAST_EPILOGUE=0", EMU_FAST_ALGO=1, EMU_FAST_EPILOGUE=stage // 3)
      for stage in (0, 3)),
    Programs("asked", "fp32", 2, [*TRAIN, "-z", 3, "-b", 2, "-n", 2, "--sample-tokens", 4],
             [*ASK, "--choices", WORK / "choices.jsonl", "-b", 2],
             [*ASK, "--prompts", WORK / "prompts.jsonl", "-b", 2, "--sample-tokens", 4],
             [*ASK, "--generate", "abc", "--sample-tokens", 4],
             [*ASK, "--eval", "-d", WORK / "data", "-z", 3], [*ASK, "--export", "run/export", "-z", 3]),
]


def remembered(log):
    """From an older log: mutation -> the test, build and seed that found it, which run first."""
    lines = log.read_text().splitlines() if log.exists() else []
    found = {}
    for line, why in zip(lines, lines[1:]):
        if line.startswith("noticed"):
            found[line.split(" s  ", 1)[1]] = why.strip()
    return found


def try_mutation(mutation, folder, before):
    """The result of a mutation, and the reason. before: an entry of `remembered`."""
    tests = sorted((test.seconds(mutation.number), i) for i, test in enumerate(TESTS)
                   if test.seconds(mutation.number) is not None)
    attempts = [(f"{TESTS[i].name}, {'checked' if checked else 'plain'}, seed {seed}: ", TESTS[i], checked, seed)
                for checked, seeds in ((True, CHECKED_SEEDS), (False, PLAIN_SEEDS)) for _, i in tests for seed in seeds]
    attempts.sort(key=lambda attempt: not before.startswith(attempt[0]))
    hung = {}
    for where, test, checked, seed in attempts:
        if (test, checked) in hung:
            continue
        said = test.notices(mutation.number, checked, seed, folder)
        if said == HANGS:
            hung[test, checked] = where + said
        elif said is not None:
            return "noticed", where + said
    if hung:
        return "UNSURE", "; ".join(hung.values())
    return "SURVIVES", "no test fails" if tests else "no test comes by it"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutations only")
    parser.add_argument("--only", default="", help="those whose file:line or text this finds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time")
    parser.add_argument("--log", type=pathlib.Path, default=ROOT / "build" / "mutations.log",
                        help="where it goes too (default: build/mutations.log)")
    options = parser.parse_args()
    if options.list:
        found = []
        for path in sources():
            mutate(path, found)
        print("\n".join(f"{m}{'  SPARED' if m.spared else ''}" for m in found
                        if re.search(options.only, str(m))))
        return 0
    options.log.parent.mkdir(exist_ok=True)
    before = remembered(options.log)
    log, lock, start, thread = open(options.log, "w"), threading.Lock(), time.time(), threading.local()

    def say(text):
        with lock:
            print(text, flush=True)
            print(text, file=log, flush=True)

    def folder():
        if not hasattr(thread, "folder"):
            thread.folder = pathlib.Path(tempfile.mkdtemp(dir=WORK))
        return thread.folder

    def measure(test):
        try:
            test.measure(folder())
            return True
        except AssertionError as error:
            say(f"left out: {error}")
            return False

    def attempt(mutation):
        began = time.time()
        what, why = try_mutation(mutation, folder(), before.get(str(mutation), ""))
        say(f"{what:8} {time.time() - began:5.1f} s  {mutation}\n                    {why}")
        return what

    chosen = [m for m in write_tree() if re.search(options.only, str(m))]
    spared, chosen = [m for m in chosen if m.spared], [m for m in chosen if not m.spared]
    build()
    prepare_data()
    say(f"built in {time.time() - start:.0f} s")
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        passing = list(pool.map(measure, TESTS))
        TESTS[:] = [test for test, passes in zip(TESTS, passing) if passes]
        say(f"{len(TESTS)} of {len(passing)} tests pass without a mutation; {time.time() - start:.0f} s")
        outcomes = list(pool.map(attempt, chosen))
    for mutation in spared:
        say(f"spared: {mutation}: {mutation.spared}")
    for mutation, outcome in zip(chosen, outcomes):
        if outcome != "noticed":
            say(f"{outcome}: {mutation}")
    num_noticed = outcomes.count("noticed")
    say(f"{num_noticed} of {len(chosen)} mutations noticed, {len(spared)} spared, {time.time() - start:.0f} s")
    say(f"{num_noticed} passed, {len(chosen) - num_noticed} failed")
    return num_noticed < len(chosen) or not all(passing)


if __name__ == "__main__":
    sys.exit(main())
