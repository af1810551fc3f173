/* rates.h: the optimizer's settings from the command line, and the learning rate and weight decay of each tensor.
 * --param-group 'PATTERN:lr=FACTOR,wd=DECAY;PATTERN:...'  gives tensors whose name fits the shell pattern (fnmatch) a
 * factor of the learning rate and a weight decay of their own; of groups that fit the same tensor a later one wins. */
#pragma once
#include <fnmatch.h>
#include "data/flags.h"
#include "kernels/optimizer.cuh"
#include "zero/shard.h"

static const FlagWords flag_words_of_rows = {optimizer_words, schedule_words, schedules_of_deepspeed};

/* A flag's value: as given, else the optimizer's default, else the flag's default. */
static double optimizer_value(const Flags* f, FlagIdx idx, double of_flag, double of_row)
{
    return f->given[idx] || of_row < 0 ? of_flag : of_row;
}
static double optimizer_beta1(const Flags* f)
{
    return optimizer_value(f, FLAG_beta1, f->beta1, optimizer_find(f->optimizer)->beta1);
}
static double optimizer_beta2(const Flags* f)
{
    return optimizer_value(f, FLAG_beta2, f->beta2, optimizer_find(f->optimizer)->beta2);
}
static double optimizer_momentum(const Flags* f)
{
    return f->momentum >= 0 ? f->momentum : fmax(optimizer_find(f->optimizer)->momentum, 0);
}
static double optimizer_weight_decay(const Flags* f)
{
    return optimizer_value(f, FLAG_weight_decay, f->weight_decay, optimizer_find(f->optimizer)->weight_decay);
}

static OptimizerConfig optimizer_config(const Flags* f)
{
    return {(float)f->eps, (float)optimizer_momentum(f), (float)f->dampening, f->nesterov, (uint64_t)f->seed};
}

static bool optimizer_takes(const OptimizerRow* row, const char* flag) { return word_in_list(flag, row->flags, ' '); }

/* Does the optimizer orthogonalize hidden matrices? Muon does. */
static bool optimizer_has_matrices(const Flags* f)
{
    return optimizer_find(f->optimizer)->phase == TensorPhase::MATRICES;
}

// ---- schedule

/* One number of --schedule-params, by the name that DeepSpeed gives it. */
struct ScheduleParam {
    const char* name;
    double ScheduleParams::*field;
    double low, high;
};
#define SCHEDULE_PARAM(name, fallback, low, high) {#name, &ScheduleParams::name, low, high},
static const ScheduleParam schedule_param_rows[] = { SCHEDULE_PARAMS(SCHEDULE_PARAM) };
#undef SCHEDULE_PARAM
#define SCHEDULE_PARAM(name, fallback, low, high) " " #name
static const char* const schedule_param_names = &SCHEDULE_PARAMS(SCHEDULE_PARAM)[1];
#undef SCHEDULE_PARAM

/* --schedule-params NAME=VALUE,NAME=VALUE; what it leaves out is as DeepSpeed has it. */
static ScheduleParams schedule_params(const Flags* f)
{
    ScheduleParams params = SCHEDULE_PARAMS_DEFAULT;
    char item[64];
    for (const char* list = f->schedule_params; word_next(&list, ',', item);) {
        char *value = strchr(item, '='), *end = nullptr;
        if (value != nullptr) *value++ = 0;
        const ScheduleParam* row = nullptr;
        for (const ScheduleParam& r : schedule_param_rows) if (strcmp(r.name, item) == 0) row = &r;
        if (row == nullptr || value == nullptr)
            die_usage("--schedule-params %s: have NAME=VALUE with one of the names %s", item, schedule_param_names);
        double x = strcmp(value, "true") == 0 ? 1 : strcmp(value, "false") == 0 ? 0 : strtod(value, &end);
        if (end != nullptr && (end == value || *end != 0)) x = NAN;
        if (!(x >= row->low && x <= row->high))
            die_usage("--schedule-params %s=%s: have a number from %g to %g", item, value, row->low, row->high);
        params.*row->field = x;
    }
    return params;
}

/* Does OneCycle move beta1? DeepSpeed's does, of an optimizer that has one. */
static bool has_momentum_cycle(const Flags* f)
{
    return strcmp(f->schedule_as, "deepspeed") == 0 && strcmp(f->schedule, "onecycle") == 0 &&
           schedule_params(f).cycle_momentum != 0 && optimizer_takes(optimizer_find(f->optimizer), "beta1") &&
           !optimizer_has_matrices(f);
}

/* What only one of the two sequences of learning rates has. */
static void schedule_refuse(const Flags* f)
{
    const bool deepspeed = strcmp(f->schedule_as, "deepspeed") == 0;
    const ScheduleRow* row = schedule_find(f->schedule);
    char have[256] = "";
    for (const ScheduleRow& r : schedule_rows)
        if (strcmp(r.deepspeed, "none") != 0)
            snprintf(have + strlen(have), sizeof have - strlen(have), "%s%s", have[0] ? ", " : "", r.name);
    if (deepspeed && strcmp(row->deepspeed, "none") == 0)
        die_usage("--schedule-as deepspeed: DeepSpeed has no --schedule %s; have %s", f->schedule, have);
    if (f->schedule_params[0] && !deepspeed)
        die_usage("--schedule-params %s goes with --schedule-as deepspeed, whose parameters these are: give that, or "
                  "leave it out", f->schedule_params);
    if ((f->given[FLAG_warmup_min_lr] || f->given[FLAG_warmup_type]) && (row->traits & FROM_MIN) != 0)
        die_usage("--warmup-type and --warmup-min-lr shape a warm-up; --schedule %s has one of its own, from --min-lr: "
                  "leave them out", f->schedule);
    schedule_params(f);
}

// ---- optimizer

/* A flag that some optimizer's row names is refused with one whose row does not name it, unless most use it. */
static void rates_refuse(const Flags* f)
{
    schedule_refuse(f);
    for (const FlagRow& flag : flag_rows) {
        char name[64], takers[256] = "";
        if (!f->given[&flag - flag_rows] || word_in_list(flag.name, Rule::FLAGS, ' ')) continue;
        for (const OptimizerRow& row : optimizer_rows)
            if (optimizer_takes(&row, flag.name))
                snprintf(takers + strlen(takers), sizeof takers - strlen(takers), "%s%s", takers[0] ? " and " : "",
                         row.name);
        if (takers[0] && !optimizer_takes(optimizer_find(f->optimizer), flag.name))
            die_usage("%s is for --optimizer %s, not %s: leave it out", flag_long_name(&flag, name), takers,
                      f->optimizer);
    }
}

/* Applies one parameter group to the tensors that match. Overwrites the text. */
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

/* Sets learning rate and weight decay of every tensor. */
static void rates_apply(Shard* s, const Flags* f)
{
    const bool matrices = optimizer_has_matrices(f);
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
        if (matrices && s->tensors[t].hidden) s->tensors[t].lr_factor *= f->lr > 0 ? (float)(f->muon_lr / f->lr) : 0.0f;
}

static void rates_print(const Flags* f, FILE* file)
{
    const OptimizerRow* row = optimizer_find(f->optimizer);
    fprintf(file, "update  %s", f->optimizer);
    if (optimizer_has_matrices(f)) fprintf(file, " at %g for hidden matrices, the rest by adamw", f->muon_lr);
    if (optimizer_takes(row, "momentum")) fprintf(file, ", momentum %g", optimizer_momentum(f));
    const ScheduleParams params = schedule_params(f);
    if (has_momentum_cycle(f)) fprintf(file, ", beta %g to %g, 0.99", params.cycle_min_mom, params.cycle_max_mom);
    else if (optimizer_takes(row, "beta1")) fprintf(file, ", beta %g %g", optimizer_beta1(f), optimizer_beta2(f));
    say_to(file, ", weight decay %g%s%s\n", optimizer_weight_decay(f), f->param_group[0] ? ", groups " : "",
           f->param_group);
}

/* Part of --help: the rows of both tables. dev/doc_tables.py makes the tables of docs/optimizers.md from it. */
static void rates_help(FILE* file)
{
    fprintf(file, "\n--optimizer: the update, states, flags with their defaults\n");
    for (const OptimizerRow& row : optimizer_rows) {
        Flags flags;
        char name[64], value[64];
        flags_parse(&flags, &flag_words_of_rows, 0, nullptr);
        flags.optimizer = row.name;
        flags.beta1 = optimizer_beta1(&flags);
        flags.beta2 = optimizer_beta2(&flags);
        flags.momentum = optimizer_momentum(&flags);
        flags.weight_decay = optimizer_weight_decay(&flags);
        fprintf(file, "  %s: %s |", row.name, row.update);
        for (int k = 0; k < MAX_STATES; k++)
            if (row.states[k] != nullptr) fprintf(file, " %s", row.states[k]);
        fprintf(file, " |");
        for (const FlagRow& flag : flag_rows)
            if (optimizer_takes(&row, flag.name) || strcmp(flag.name, "weight_decay") == 0)
                fprintf(file, " %s=%s", flag_long_name(&flag, name), flag_value(&flags, &flag, value));
        fprintf(file, "\n");
    }
    fprintf(file, "\n--schedule: the learning rate after the warm-up, and DeepSpeed's scheduler of --schedule-as\n");
    for (const ScheduleRow& row : schedule_rows) fprintf(file, "  %s: %s | %s\n", row.name, row.help, row.deepspeed);
}
