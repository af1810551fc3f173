/* sample.h: the next token from its logits: repetition penalty, temperature, top-k, top-p, in this order.
 *
 * The candidates are ranked by logit, the smaller id first among equals, but only as far as they are asked for, most
 * often a few of a vocabulary. The total of all probabilities does not need their order, except for its last bits.
 * Where these could decide, all candidates are ranked and summed in that order, so that the token is always the one
 * that a full sort gives. */
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include "data/error.h"

typedef struct GenerateConfig {
    int num_tokens, top_k;
    double temperature, top_p, repetition_penalty;
    uint64_t seed;
} GenerateConfig;

/* Logits of ids that the text has, each once: divided by the penalty where positive, multiplied where negative (Keskar
 * et al. 2019, arXiv:1909.05858). */
static void penalise_repetition(float* logits, int V, const int* ids, int num_ids, double penalty)
{
    if (penalty == 1) return;
    bool* seen = (bool*)malloc_checked(V * sizeof *seen);
    memset(seen, 0, V * sizeof *seen);
    for (int i = 0; i < num_ids; i++) {
        if (seen[ids[i]]) continue;
        seen[ids[i]] = true;
        float* x = &logits[ids[i]];
        *x = (float)(*x > 0 ? *x / penalty : *x * penalty);
    }
    free(seen);
}

// --------------------------------------------------------------------------------------------------------- ranking
typedef struct { float logit; int id; } Candidate;

static bool candidate_before(Candidate a, Candidate b)
{
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}
static int candidate_compare(const void* a, const void* b)
{
    return candidate_before(*(const Candidate*)b, *(const Candidate*)a) ? 1 : -1;
}

/* Quicksort as far as it has been asked for. all[0 .. num_ranked) are in order. What is before all[ends[e]] is before
 * everything behind it, too; the ends fall, and the first is V. */
enum { RANKING_ENDS = 64, RANKING_FEW = 64, RANKING_LOOKS = 16 };
typedef struct Ranking {
    Candidate* all;
    int V, num_ranked, num_ends, ends[RANKING_ENDS];
    double temperature;
} Ranking;

/* NaN has no place in an order: it is never chosen. */
static Ranking ranking_begin(const float* logits, int V, double temperature)
{
    Ranking r = {(Candidate*)malloc_checked(V * sizeof(Candidate)), V, 0, 1, {V}, temperature};
    for (int i = 0; i < V; i++) r.all[i] = Candidate{std::isnan(logits[i]) ? -INFINITY : logits[i], i};
    return r;
}

/* Brings to the front of c (num) what is before the second best of a few samples; how many these are. Most
 * often the front alone is asked for, so that a small one is better than half. */
static int candidates_part(Candidate* c, int num)
{
    Candidate best = c[0], second = c[num / RANKING_LOOKS];
    for (int look = 1; look < RANKING_LOOKS; look++) {
        const Candidate x = c[(size_t)num * look / RANKING_LOOKS];
        if (candidate_before(x, best)) { second = best; best = x; }
        else if (look == 1 || candidate_before(x, second)) second = x;
    }
    int num_before = 0;
    for (int i = 0; i < num; i++) {
        if (!candidate_before(c[i], second)) continue;
        const Candidate x = c[i];
        c[i] = c[num_before];
        c[num_before++] = x;
    }
    return num_before;
}

/* The i-th likeliest. */
static Candidate ranking_at(Ranking* r, int i)
{
    while (r->num_ranked <= i) {
        const int first = r->num_ranked, end = r->ends[r->num_ends - 1];
        if (end - first <= RANKING_FEW) {
            qsort(r->all + first, end - first, sizeof(Candidate), candidate_compare);
            r->num_ranked = end;
            r->num_ends--;
        } else {                                     // without room the last end is forgotten
            if (r->num_ends < RANKING_ENDS) r->num_ends++;
            r->ends[r->num_ends - 1] = first + candidates_part(r->all + first, end - first);
        }
    }
    return r->all[i];
}

/* Probability of the i-th likeliest, relative to the first. */
static double ranking_weight(Ranking* r, int i)
{
    const float first = ranking_at(r, 0).logit;
    return exp((ranking_at(r, i).logit - first) / r->temperature);
}

// -------------------------------------------------------------------------------------------------------- sampling
/* Sum of the weights of the first k, as exact as known: between the two. */
typedef struct { double low, high; } Total;

/* In the order of the ranking. */
static Total total_ranked(Ranking* r, int k)
{
    double sum = 0;
    for (int i = 0; i < k; i++) sum += ranking_weight(r, i);
    return Total{sum, sum};
}

/* Of all, in any order: two sums of V terms that are not negative differ by less than V ulps. */
static Total total_of_all(Ranking* r)
{
    const double first = ranking_at(r, 0).logit, error = r->V * 0x1p-51;
    double sum = 0;
    for (int i = 0; i < r->V; i++) sum += exp((r->all[i].logit - (float)first) / r->temperature);
    return Total{sum * (1 - error), sum * (1 + error)};
}

/* The sample among the first k, or -1 if it depends on where in its bounds the total is. */
static int sample_ranked(Ranking* r, int k, Total total, double top_p, double u)
{
    int num_kept = 0;
    double below = 0, kept = 0;
    if (top_p < 1) {
        while (num_kept < k && (num_kept == 0 || kept < top_p * total.low)) kept += ranking_weight(r, num_kept++);
        if (num_kept < k && kept < top_p * total.high) return -1;
        k = num_kept;
        total = Total{kept, kept};
    }
    for (int i = 0; i < k; i++) {
        below += ranking_weight(r, i);
        if (below > u * total.high) return ranking_at(r, i).id;
        if (below > u * total.low) return -1;
    }
    return total.low < total.high ? -1 : ranking_at(r, k - 1).id;
}

/* One of the top_k (0: all) likeliest ids, of which as many are left as reach top_p together, with probability
 * softmax(logits / temperature); temperature 0: the likeliest. logits (V); u uniform in [0,1). */
static int sample_token(const float* logits, int V, const GenerateConfig* config, double u)
{
    int best = 0;
    for (int i = 1; i < V; i++) if (logits[i] > logits[best] || std::isnan(logits[best])) best = i;
    if (config->temperature == 0 || config->top_k == 1 || !(fabsf(logits[best]) <= FLT_MAX)) return best;
    const int k = config->top_k > 0 && config->top_k < V ? config->top_k : V;
    Ranking r = ranking_begin(logits, V, config->temperature);
    int chosen = k == V ? sample_ranked(&r, V, total_of_all(&r), config->top_p, u) : -1;
    if (chosen < 0) chosen = sample_ranked(&r, k, total_ranked(&r, k), config->top_p, u);
    free(r.all);
    return chosen;
}
