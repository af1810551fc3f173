/* step_time.cuh: estimated time of a step: the costs of its operations (cost.cuh), each by itself.
 *   step_time    seconds of a step of a planned run      costs_print   the same by operation
 *
 * GPU   kernel_time.cuh
 * CPU   flops at a share of the peak, bytes at a share of the triad bandwidth, both measured at the start: cpu_rates
 * network  bytes / link + 50 us per collective. Among more than 8 ranks the link is that of a host's 8 adapters. With
 *       overlap, communication hidden behind the backward (gradients) and the forward (parameters) costs them only the
 *       multiprocessors that it takes; the embeddings' gradient comes last and is exposed.
 * host  with --offload: bytes of the update in host memory / PCIe bandwidth, if that is longer than the update. With
 *       overlap the next forward hides what PCIe takes longer than device memory would. Copies of parameter slices
 *       before a gather, and of reduced gradients, count as communication. In the CPU build host
 *       memory is the device's
 * What the rates are taken from is in docs/benchmarks.md. */
#pragma once
#include "kernel_time.cuh"

static const double COLLECTIVE_S = 50e-6, CTA_RATE = 23e9;
static const double LINK_SHARE = 0.81, NETWORK_SHARE = 0.75, HOST_SHARE = 0.78;
enum { HOST_GPUS = 8 };

typedef struct StepTime { double forward_s, backward_s, update_s, wire_s, exposed_s, step_s; } StepTime;

/* Of the CPU's operations by how their names begin: what is reached of the peak (with flops) or of the bandwidth,
 * of GEMMs with 256 rows and with 1024, of attention with sequences of 64 and 1024; between them on a logarithmic
 * scale. Medians of three runs of `test_ops --bench`, in dev/LOG.md: "the estimated step, on a quiet machine". */
static const struct { const char* begins; double few, many; } cpu_rates[] = {
    {"matmul_", 0.92, 0.92},
    {"attention_", 0.27, 0.72},
    {"optimizer_", 1.08, 1.08},                      // better than the triad, whose arrays are two
    {"cudaMemset", 1, 1},
    {"global_norm", 0.67, 0.67},
    {"", 0.55, 0.55},                                // norms, activations, classifier
};

static double cpu_seconds(const Device* d, const Cost* c, double T)
{
    int i = 0;
    while (strncmp(c->op, cpu_rates[i].begins, strlen(cpu_rates[i].begins)) != 0) i++;
    double rows = strcmp(c->op, "matmul_backward_weight") == 0 ? c->inner : c->rows;   // of the head: of a chunk
    double at = c->product[0] ? log2(rows / 256) / 2 : log2(T / 64) / 4;
    double share = cpu_rates[i].few + fmin(1, fmax(0, at)) * (cpu_rates[i].many - cpu_rates[i].few);
    return c->flops > 0 ? c->flops / (share * d->peak_flops) : c->bytes / (share * d->memory_gbps * 1e9);
}

static double gpu_seconds(const Device* d, const Model* m, const Cost* c)
{
    if (c->product[0]) return gemm_seconds(d, c);
    return c->flops > 0 ? attention_seconds(d, m, c) : memory_seconds(d, c->bytes) + c->calls * KERNEL_S;
}

/* 0 where the device's rates are not known. */
static double cost_seconds(const Device* d, const Model* m, const Cost* c)
{
    if (d->peak_flops <= 0 || d->memory_gbps <= 0) return 0;
    if (d->row != nullptr) return gpu_seconds(d, m, c);
    return cpu_seconds(d, c, m->T);
}

/* Bytes that a rank sends in a second. */
static double wire_rate(const Device* d, int num_ranks)
{
    if (d->row == nullptr) return 0;
    double network_gbps = NETWORK_SHARE * HOST_GPUS * d->row->network_gbps;
    return 1e9 * (num_ranks <= HOST_GPUS ? LINK_SHARE * d->link_gbps : network_gbps);
}

static double wire_seconds(double rate, double bytes, double collectives)
{
    return bytes > 0 ? bytes / rate + collectives * COLLECTIVE_S : 0;
}

/* Bytes between host memory and device in a second, each way. A CPU reads and writes for both. */
static double host_rate(const Device* d)
{
    return 1e9 * (d->row != nullptr ? HOST_SHARE * d->row->host_gbps : d->memory_gbps / 2);
}

/* The update reads gradients twice, for their norm and for the step, and LAMB the states three times. */
static double update_host_bytes(const Zero* z)
{
    HostBytes host = host_bytes(z);
    double states = host.states * (z->optimizer->phase == TensorPhase::NORMS ? 3 : 1);
    return states + fmax(2 * host.gradients, host.parameters);
}

/* Of the time of collectives that other work hides, the share that it loses to them: NCCL's blocks take
 * multiprocessors, one for each CTA_RATE. */
static double taken_share(const Device* d, double rate)
{
    return d->row != nullptr ? fmin(1, rate / CTA_RATE / d->row->num_sms) : 0;
}

/* What of the collectives, and of what goes to host memory and comes from there beside them, the step waits for. */
static void wire_time(StepTime* t, const Device* d, const Model* m, double rate)
{
    const Zero* z = m->zero;
    HostBytes host = host_bytes(z);
    SentBytes bytes = zero_sent_bytes(z, nullptr);
    double G = z->num_micro_steps, grad_calls = 0, param_calls = 0;
    for (int b = 0; b < z->grad_buckets.num_buckets; b++) grad_calls += bucket_is_buffered(&z->grad_buckets, b) ? G : 1;
    for (int b = 0; b < z->param_buckets.num_buckets; b++)
        param_calls += bucket_is_buffered(&z->param_buckets, b) ? 2 * G : 1;
    double gradients_s = wire_seconds(rate, (double)bytes.gradients, grad_calls) + G * host.gradients / host_rate(d);
    double parameters_s = wire_seconds(rate, (double)bytes.parameters, param_calls) +
                          2 * G * host.parameters / host_rate(d);
    double others_s = wire_seconds(rate, (double)(bytes.sums + bytes.optimizer), bytes.optimizer > 0 ? 2 : 1);
    double last_elems = 0;                           // the embeddings, and before them the unit stored in fp32
    for (int u = 0; u <= unit_embed(&m->config); u++) last_elems += (double)z->shard->units[u].range.count;
    double last = (double)bytes.gradients * last_elems / z->shard->num_elems;
    double last_s = fmin(gradients_s, wire_seconds(rate, last / (zero_slices_grads(z) ? G : 1), 1));
    t->wire_s = gradients_s + parameters_s + others_s;
    t->exposed_s = t->wire_s;
    if (!z->overlap) return;
    double under_backward = zero_slices_grads(z) ? t->backward_s : t->backward_s / G;
    if (z->stage == 3)
        t->exposed_s = fmax(last_s, gradients_s + parameters_s - t->forward_s - under_backward);
    else
        t->exposed_s = fmax(last_s, gradients_s - under_backward) + fmax(0, parameters_s - t->forward_s / G);
    t->exposed_s += others_s;
    t->exposed_s += taken_share(d, rate) * fmax(0, t->wire_s - t->exposed_s);
}

/* What a step waits for its update, whose operations take t->update_s in device memory. The norm of gradients in host
 * memory comes before; beside the rest runs the forward of the next step's first micro-step. That needs device memory
 * as the update does, but not PCIe. */
static double update_seconds(const StepTime* t, const Device* d, const Zero* z)
{
    const double norm_s = (double)host_bytes(z).gradients / host_rate(d);
    const double rest_s = update_host_bytes(z) / host_rate(d) - norm_s;
    const double hidden_s = z->overlap ? t->forward_s / z->num_micro_steps : 0;
    return fmax(t->update_s, norm_s + fmax(0, rest_s - hidden_s));
}

static StepTime step_time(const Device* d, const Model* m, const Costs* costs)
{
    StepTime t = {};
    for (int i = 0; i < costs->num_costs; i++) {
        const Cost* c = &costs->costs[i];
        double* part_s = c->part == Part::FORWARD ? &t.forward_s : c->part == Part::OPTIMIZER ? &t.update_s
                                                                                              : &t.backward_s;
        *part_s += cost_seconds(d, m, c);
    }
    if (d->row != nullptr) t.update_s = update_seconds(&t, d, m->zero);
    double rate = wire_rate(d, m->zero->comm->num_ranks);
    if (rate > 0) wire_time(&t, d, m, rate);
    if (rate > 0 && m->config.tp > 1) {              // nothing hides it: what follows reads it
        const double bytes = (double)(model_sent_bytes(m, false) + model_sent_bytes(m, true));
        const double tp_s = wire_seconds(wire_rate(d, m->config.tp), bytes, costs->tp.streams + costs->tp.heads);
        t.wire_s += tp_s;
        t.exposed_s += tp_s;
    }
    t.step_s = t.forward_s + t.backward_s + t.update_s + t.exposed_s;
    return t;
}

/* One line for each operation, by parts. */
static void costs_print(const Device* d, const Model* m, const Costs* costs, FILE* f)
{
    fprintf(f, "operations per step and rank%s\n", d->memory_gbps > 0 ? ", estimated times" : "");
    for (Part part : {Part::FORWARD, Part::BACKWARD, Part::RECOMPUTE, Part::OPTIMIZER}) {
        for (int i = 0; i < costs->num_costs; i++) {
            const Cost* c = &costs->costs[i];
            if (c->part != part) continue;
            fprintf(f, "  %-10s %-27s %-8s %7.0f calls %12.6g Gflop %12.6g MB", part_names[(int)part], c->op,
                    c->product, c->calls, c->flops * 1e-9, c->bytes * 1e-6);
            double seconds = cost_seconds(d, m, c);
            if (seconds > 0) fprintf(f, " %10.4g ms", seconds * 1e3);
            fprintf(f, "\n");
        }
    }
}
