/* test_sample.cpp: the token that is sampled is the one that a full sort gives: for random, flat and steep logits, many
 * of them equal, at all ends of top-k, top-p, temperature and u, also where the last bit of a sum decides.
 *   test_sample          checks          test_sample --bench   times a vocabulary of 128256 */
#include <initializer_list>
#include "data/clock.h"
#include "model/sample.h"

static uint64_t random_state = 1;
static double uniform()
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(random_state >> 11) / 9007199254740992.0;
}

static int compare(const void* a, const void* b)
{
    const Candidate *x = (const Candidate*)a, *y = (const Candidate*)b;
    return x->logit < y->logit ? 1 : x->logit > y->logit ? -1 : x->id - y->id;
}

typedef struct { int id; double total, kept; } Sorted;

/* The definition: all sorted, summed in that order. */
static Sorted sample_sorted(const float* logits, int V, const GenerateConfig* config, double u)
{
    Candidate* order = (Candidate*)malloc_checked(V * sizeof *order);
    for (int i = 0; i < V; i++) order[i] = Candidate{logits[i], i};
    qsort(order, V, sizeof *order, compare);
    int k = config->top_k > 0 && config->top_k < V ? config->top_k : V, num_kept = 0;
    double below = 0;
    Sorted s = {order[0].id, 0, 0};
    for (int i = 0; i < k; i++) s.total += exp((order[i].logit - order[0].logit) / config->temperature);
    while (num_kept < k && (num_kept == 0 || s.kept < config->top_p * s.total))
        s.kept += exp((order[num_kept++].logit - order[0].logit) / config->temperature);
    for (int i = 0; i < num_kept && below <= u * s.kept; i++) {
        s.id = order[i].id;
        below += exp((order[i].logit - order[0].logit) / config->temperature);
    }
    free(order);
    return s;
}

/* Spread 0: all are equal. With few steps many are. */
static void random_logits(float* logits, int V, double spread, int steps)
{
    for (int i = 0; i < V; i++) {
        double x = uniform();
        logits[i] = (float)(spread * (steps > 0 ? floor(x * steps) / steps : log(x + 1e-12)));
    }
}

static int check(const float* logits, int V, const GenerateConfig* config, double u)
{
    const int ours = sample_token(logits, V, config, u), truth = sample_sorted(logits, V, config, u).id;
    if (ours == truth) return 0;
    printf("FAILED V %d top_k %d top_p %.17g temperature %g u %.17g: token %d, sorted %d\n", V, config->top_k,
           config->top_p, config->temperature, u, ours, truth);
    return 1;
}

/* Relative to the first, of the first `end` in the order of a sort. */
static double sorted_prefix(const float* logits, int V, double temperature, int end)
{
    Candidate* order = (Candidate*)malloc_checked(V * sizeof *order);
    for (int i = 0; i < V; i++) order[i] = Candidate{logits[i], i};
    qsort(order, V, sizeof *order, compare);
    double sum = 0;
    for (int i = 0; i < end; i++) sum += exp((order[i].logit - order[0].logit) / temperature);
    free(order);
    return sum;
}

/* u and top_p at which a sum of the definition is met to the bit, and their neighbours. */
static int check_ties(const float* logits, int V, GenerateConfig config)
{
    const double prefix = sorted_prefix(logits, V, config.temperature, 1 + (int)(uniform() * (V - 1)));
    const Sorted s = sample_sorted(logits, V, &config, 0);
    const double u = prefix / s.kept, top_p = prefix / s.total;
    int num_wrong = 0;
    for (double toward : {0.0, u, 2.0})
        if (nextafter(u, toward) < 1) num_wrong += check(logits, V, &config, nextafter(u, toward));
    for (double toward : {0.0, top_p, 2.0}) {
        config.top_p = nextafter(top_p, toward);
        if (config.top_p <= 1) num_wrong += check(logits, V, &config, 1 - 0x1p-53);
    }
    return num_wrong;
}

/* Logits that are not finite end, and NaN is chosen only where there is nothing else. */
static int check_nonfinite(float* logits, int V)
{
    int num_wrong = 0;
    for (float x : {NAN, -INFINITY})
        for (int first : {0, 1})                     // the only finite ones: one in each so many from here on, or one
            for (int every : {2, 3, V}) {
                for (int i = 0; i < V; i++) logits[i] = i % every == first % V ? -0.01f * i : x;
                for (int top_k : {0, 40})
                    for (double top_p : {0.9, 1.0})
                        for (double u : {0.0, uniform(), 1 - 0x1p-53}) {
                            const GenerateConfig config = {0, top_k, 0.8, top_p, 1, 0};
                            const int id = sample_token(logits, V, &config, u);
                            if (std::isfinite(logits[id])) continue;
                            printf("FAILED V %d %g every %d: token %d is %g\n", V, x, every, id, logits[id]);
                            num_wrong++;
                        }
            }
    return num_wrong;
}

static void bench()
{
    const int V = 128256, num_runs = 20;
    float* logits = (float*)malloc_checked(V * sizeof(float));
    for (bool flat : {false, true}) {                // Zipf's law, as text has it, or nearly alike
        random_logits(logits, V, flat ? 0.2 : 1.0, 0);
        for (int i = 0; i < (flat ? 0 : V); i++) logits[i] = -1.2f * log1pf(V * expf(logits[i]));
        for (GenerateConfig config : {GenerateConfig{0, 40, 0.8, 1, 1, 0}, GenerateConfig{0, 0, 0.8, 0.95, 1, 0},
                                      GenerateConfig{0, 0, 1, 1, 1, 0}}) {
            double ms[2] = {};
            for (int i = 0; i < num_runs; i++) {
                const double u = uniform(), start = now_s();
                const int ours = sample_token(logits, V, &config, u);
                const double middle = now_s();
                const int truth = sample_sorted(logits, V, &config, u).id;
                ms[0] += (middle - start) * 1e3 / num_runs;
                ms[1] += (now_s() - middle) * 1e3 / num_runs;
                if (ours != truth) printf("FAILED\n");
            }
            printf("V %d %-4s top_k %2d top_p %4g: %5.2f ms, with a full sort %5.2f ms\n", V, flat ? "flat" : "Zipf",
                   config.top_k, config.top_p, ms[0], ms[1]);
        }
    }
    free(logits);
}

int main(int argc, char** argv)
{
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) return bench(), 0;
    int num_wrong = 0, num_checks = 0;
    for (int V : {1, 2, 3, 7, 100, 1000, 5000}) {
        float* logits = (float*)malloc_checked(V * sizeof(float));
        for (double spread : {0.0, 0.3, 3.0, 40.0}) {
            for (int steps : {0, 4, 300}) {
                random_logits(logits, V, spread, steps);
                for (int top_k : {0, 1, 2, 40, V - 1, V, V + 5})
                    for (double top_p : {0.0, 0.3, 0.9, 0.999999, 1.0})
                        for (double temperature : {0.1, 0.8, 100.0})
                            for (double u : {0.0, uniform(), 1 - 0x1p-53}) {
                                if (V > 1000 && uniform() > 0.2) continue;
                                const GenerateConfig config = {0, top_k, temperature, top_p, 1, 0};
                                num_wrong += check(logits, V, &config, u);
                                num_checks++;
                            }
                const GenerateConfig all = {0, 0, 0.8, 1, 1, 0};
                for (int i = 0; i < 20; i++, num_checks += 6) num_wrong += check_ties(logits, V, all);
            }
        }
        num_wrong += check_nonfinite(logits, V);
        free(logits);
    }
    printf("%d tokens sampled, %d are not those of a full sort\n", num_checks, num_wrong);
    return num_wrong > 0;
}
