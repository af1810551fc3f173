/* rates.h: the optimizer as the command line says it, and the learning rate and weight decay of each tensor.
 * --param-group 'PATTERN:lr=FACTOR,wd=DECAY;PATTERN:...'  gives tensors whose name fits the shell pattern (fnmatch) a
 * factor of the learning rate and a weight decay of their own; of groups that fit the same tensor a later one wins. */
#pragma once
#include <fnmatch.h>
#include "data/flags.h"
#include "kernels/optimizer.cuh"
#include "zero/shard.h"

static double optimizer_beta2(const Flags* f)
{
    return f->given[FLAG_beta2] ? f->beta2 : optimizer_find(f->optimizer)->beta2;
}
static double optimizer_momentum(const Flags* f)
{
    return f->momentum >= 0 ? f->momentum : optimizer_find(f->optimizer)->momentum;
}
static double optimizer_weight_decay(const Flags* f)
{
    return f->given[FLAG_weight_decay] ? f->weight_decay : optimizer_find(f->optimizer)->weight_decay;
}

static OptimizerConfig optimizer_config(const Flags* f)
{
    return {optimizer_find(f->optimizer)->optimizer, (float)f->beta1, (float)optimizer_beta2(f), (float)f->eps,
            (float)optimizer_momentum(f), (float)f->dampening, f->nesterov, (uint64_t)f->seed};
}

/* Flags of one optimizer are refused with another. */
static void rates_refuse(const Flags* f)
{
    const bool sgd = strcmp(f->optimizer, "sgd") == 0, muon = strcmp(f->optimizer, "muon") == 0;
    const struct { FlagIdx idx; bool fits; const char* optimizers; } rows[] = {
        {FLAG_momentum, sgd || muon, "sgd and muon"}, {FLAG_dampening, sgd, "sgd"}, {FLAG_nesterov, sgd, "sgd"},
        {FLAG_muon_lr, muon, "muon"}};
    char name[64];
    for (const auto& row : rows)
        if (f->given[row.idx] && !row.fits)
            die_usage("%s is for --optimizer %s, not %s: leave it out", flag_long_name(&flag_rows[row.idx], name),
                      row.optimizers, f->optimizer);
}

/* One group, which is overwritten: sets what it says of the tensors that fit. */
static void rates_apply_group(Shard* s, char* group)
{
    char whole[512], *rest, *colon = strrchr(group, ':');
    snprintf(whole, sizeof whole, "%s", group);
    if (colon == nullptr || colon == group || colon[1] == 0)
        die_usage("--param-group '%s': have PATTERN:lr=FACTOR,wd=DECAY with at least one of the two", whole);
    *colon = 0;
    double lr = -1, wd = -1;
    for (char* item = strtok_r(colon + 1, ",", &rest); item != nullptr; item = strtok_r(nullptr, ",", &rest)) {
        const bool is_lr = strncmp(item, "lr=", 3) == 0, is_wd = strncmp(item, "wd=", 3) == 0;
        char* end = nullptr;
        const double value = is_lr || is_wd ? strtod(item + 3, &end) : -1;
        if (end == item + 3 || (end != nullptr && *end != 0) || !(value >= 0 && value <= 1e6))
            die_usage("--param-group '%s': '%s' is neither lr=FACTOR nor wd=DECAY with a number from 0 to 1e6", whole,
                      item);
        double* rate = is_lr ? &lr : &wd;
        if (*rate >= 0) die_usage("--param-group '%s': %.2s is there twice", whole, item);
        *rate = value;
    }
    int num_fit = 0;
    for (int t = 0; t < s->num_tensors; t++) {
        Tensor* tensor = &s->tensors[t];
        if (fnmatch(group, tensor->name, 0) != 0) continue;
        num_fit++;
        if (lr >= 0) tensor->lr_factor = (float)lr;
        if (wd >= 0) tensor->weight_decay = (float)wd;
    }
    if (num_fit == 0)
        die_usage("--param-group '%s': no tensor is called like that; the first is %s", whole, s->tensors[0].name);
}

/* Sets the rates of every tensor. */
static void rates_apply(Shard* s, const Flags* f)
{
    const bool muon = strcmp(f->optimizer, "muon") == 0;
    for (int t = 0; t < s->num_tensors; t++) {
        Tensor* tensor = &s->tensors[t];
        tensor->weight_decay = tensor->decay ? (float)optimizer_weight_decay(f) : 0.0f;
        tensor->lr_factor = 1.0f;
    }
    char *groups = strdup(f->param_group), *rest;
    ENSURE(groups != nullptr, "out of memory");
    for (char* group = strtok_r(groups, ";", &rest); group != nullptr; group = strtok_r(nullptr, ";", &rest))
        rates_apply_group(s, group);
    free(groups);
    for (int t = 0; t < s->num_tensors; t++)
        if (muon && s->tensors[t].hidden) s->tensors[t].lr_factor *= f->lr > 0 ? (float)(f->muon_lr / f->lr) : 0.0f;
}

static void rates_print(const Flags* f, FILE* file)
{
    const Optimizer optimizer = optimizer_find(f->optimizer)->optimizer;
    const bool has_momentum = optimizer == Optimizer::SGD || optimizer == Optimizer::MUON;
    fprintf(file, "update  %s", f->optimizer);
    if (optimizer == Optimizer::MUON) fprintf(file, " at %g for hidden matrices, the rest by adamw", f->muon_lr);
    if (has_momentum) fprintf(file, ", momentum %g", optimizer_momentum(f));
    if (optimizer != Optimizer::SGD && optimizer != Optimizer::ADAGRAD)
        fprintf(file, ", beta %g %g", f->beta1, optimizer_beta2(f));
    fprintf(file, ", weight decay %g%s%s\n", optimizer_weight_decay(f), f->param_group[0] ? ", groups " : "",
            f->param_group);
}
