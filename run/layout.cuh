/* layout.cuh: the ranks as a grid of replicas (data parallelism, ZeRO) and parts (tensor parallelism, --tp). A replica
 * of the model is `tp` neighbouring ranks; rank t + tp * d is part t of replica d:
 *
 *      --tp 2, 6 ranks        replica 0   replica 1   replica 2
 *      part 0                 rank 0      rank 2      rank 4       a row shards what part 0 has: GROUP_DATA, 3 ranks
 *      part 1                 rank 1      rank 3      rank 5
 *                             a column exchanges activations: tp_group
 *
 * What all ranks have whole, such as norms, is sharded over all six: GROUP_ALL.
 *   layout_choose    checks --tp and sets the groups' sizes, before anything is planned
 *   layout_connect   makes the groups' communicators */
#pragma once
#include "run.cuh"

/* Refuses a --tp that does not divide what it must, and flags that do not work with it. */
static void layout_refuse(const Run* run)
{
    const Flags* f = run->flags;
    const int tp = (int)f->tp, num_ranks = run->comm.num_ranks;
    char why[256];
    if (num_ranks % tp != 0)
        die_usage("--tp %d with %d rank%s: a replica of the model is %d ranks: start a multiple of them", tp, num_ranks,
                  num_ranks > 1 ? "s" : "", tp);
    if (tp == 1) return;
    if (config_tp_mismatch(&run->model.config, tp, why) != nullptr)
        die_usage("--tp %d: %s: take another", tp, why);
    if (optimizer_has_matrices(f))
        die_usage("--tp %d with --optimizer muon: it orthogonalizes whole matrices, of which each rank has a part: "
                  "take another optimizer", tp);
    if (f->tune)
        die_usage("--tune does not go with --tp %d yet: it measures the GEMMs of one rank: leave out one of them", tp);
}

/* Each rank of a replica has an equal part of the rows of a micro-step, at every length of --seq-ramp. */
static void layout_refuse_rows(const Run* run)
{
    const Flags* f = run->flags;
    const bool decodes = f->given[FLAG_generate] || f->given[FLAG_prompts] || f->given[FLAG_choices];
    const long long B = decodes ? 1 : run->B, rows = B * run->T, tp = f->tp;       // texts come in any number
    if (rows % tp != 0)
        die_usage("--tp %lld: -b %lld x -t %d = %lld tokens in a micro-step do not divide by it: change -b or -t", tp,
                  B, run->T, rows);
    if (f->seq_ramp[0] && B * 8 % tp != 0)
        die_usage("--tp %lld with --seq-ramp: -b %lld x 8 tokens, by which it grows, do not divide by it: change -b",
                  tp, B);
}

/* A group without a communicator, for the plan: layout_connect makes that. */
static Group group_planned(Run* run, int rank, int num_ranks)
{
    Group g;
    group_all(&g, &run->comm);
    g.rank = rank;
    g.num_ranks = num_ranks;
    return g;
}

/* Replicas, this rank's part of the model, and the sizes of all groups. The model is chosen. */
static void layout_choose(Run* run)
{
    const int tp = (int)run->flags->tp, rank = run->comm.rank, part = rank % tp;
    Model* m = &run->model;
    layout_refuse(run);
    run->dp = run->comm.num_ranks / tp;
    run->replica = rank / tp;
    m->whole = m->config;
    m->config = config_of_rank(&m->whole, tp, part);
    run->num_groups = tp > 1 ? 2 : 1;
    run->groups[GROUP_ALL] = group_planned(run, rank, run->comm.num_ranks);
    run->groups[GROUP_DATA] = group_planned(run, run->replica, run->dp);
    run->tp_group = group_planned(run, part, tp);
    run->kv_group = group_planned(run, part % m->config.kv_ranks, m->config.kv_ranks);
}

/* A replica on two hosts sends activations over the network in every block: a warning says how to keep it on one. */
static void layout_say_hosts(Run* run)
{
    char host[64] = "", first[64];
    gethostname(host, sizeof host - 1);
    memcpy(first, host, sizeof first);
    group_broadcast_host(&run->tp_group, first, sizeof first);
    const double spread = comm_max_host(&run->comm, strcmp(host, first) != 0 ? run->replica + 1 : 0);
    if (spread > 0 && run->comm.rank == 0)
        fprintf(stderr, "train_gpt: --tp %lld: the ranks of replica %d are on two hosts, and send activations from one "
                "to the other in every block: start them side by side, with mpirun --map-by slot or srun "
                "--distribution=block, and a multiple of %lld on each host\n", (long long)run->flags->tp,
                (int)spread - 1, (long long)run->flags->tp);
}

static void layout_connect(Run* run)
{
    const Group* all = &run->groups[GROUP_ALL];
    const int tp = (int)run->flags->tp, part = run->comm.rank % tp, kv_ranks = run->model.config.kv_ranks;
    group_connect(&run->groups[GROUP_ALL]);
    if (tp == 1) return;
    group_split(&run->groups[GROUP_DATA], all, part, run->replica, "dp");
    group_split(&run->tp_group, all, run->replica, part, "tp");
    if (kv_ranks > 1)
        group_split(&run->kv_group, all, run->replica * (tp / kv_ranks) + part / kv_ranks, part, "kv");
    layout_say_hosts(run);
}

/* The groups of more than one rank that this rank is in, the first of all ranks. Returns their number. */
static int layout_groups(const Run* run, const Group* (&groups)[4])
{
    int n = 0;
    for (const Group* g : {&run->groups[GROUP_ALL], &run->groups[GROUP_DATA], &run->tp_group, &run->kv_group})
        if (g->num_ranks > 1 && (n == 0 || run->flags->tp > 1)) groups[n++] = g;
    return n;
}

static void layout_free(Run* run)
{
    if (run->model.config.kv_ranks > 1) group_free(&run->kv_group);
    if (run->flags->tp > 1) group_free(&run->tp_group);
    if (run->flags->tp > 1) group_free(&run->groups[GROUP_DATA]);
    group_free(&run->groups[GROUP_ALL]);
}
