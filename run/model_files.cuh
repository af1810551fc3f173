/* model_files.cuh: the tokenizer of a run, and the small files that checkpoints and exports have beside the weights.
 *   choose_tokenizer   which tokenizer goes with the model; reads the files    write_small_files   writes them
 *   open_tokenizer     for generation, or for the sample of a run that trains
 *   tokenizer_say      that there is none
 *   tokenizer_keep     into the run folder, of a run that is resumed from a checkpoint in it */
#pragma once
#include <climits>
#include "run.cuh"

/* The tokenizer of the data, for a model that has none. That of the default data says nothing of a model that somebody
 * else has made: it is taken only for a preset that trains on them. Else false, and the reason. */
static bool choose_data_tokenizer(Run* run, bool is_preset)
{
    const Flags* f = run->flags;
    char (&why)[sizeof run->no_tokenizer] = run->no_tokenizer;
    why[0] = 0;
    const char* data = run->train_set.num_sources > 0 ? run->train_set.sources[0].name : f->data;
    if (!tokenizer_locate(data, run->tokenizer_path)) return false;
    const bool goes_with_it = f->given[FLAG_data] || (is_preset && run->train_set.num_files > 0);
    const int num_ids = goes_with_it ? tokenizer_ends(run->tokenizer_path).vocab_size : 0, V = run->model.config.V;
    if (!goes_with_it)
        snprintf(why, sizeof why, "; %s may be of another vocabulary: -d was not given", run->tokenizer_path);
    if (num_ids > V)
        snprintf(why, sizeof why, "; %s has ids up to %d, the model has %d", run->tokenizer_path, num_ids - 1, V);
    return why[0] == 0;
}

/* Rank 0: what is kept of the folders of the model and of the tokenizer. With another tokenizer than the model's own,
 * files of the model's would be about another vocabulary. */
static void read_small_files(Run* run, const char* model_name)
{
    const char* path = run->tokenizer_path;
    char folder[4096];
    model_files_free(&run->small_files);
    if (run->model.config.hf_text != nullptr)
        model_files_add(&run->small_files, model_name, run->flags->tokenizer[0] ? OF_MODEL : OF_MODEL | OF_TOKENIZER);
    if (!path[0]) return;
    path_beside(folder, path, ".");
    const char* slash = strrchr(path, '/');
    const char* name = slash != nullptr ? slash + 1 : path;
    const bool named = strcmp(name, "tokenizer.json") == 0 || tokenizer_is_pair(path);
    if (named) model_files_add(&run->small_files, folder, OF_TOKENIZER);
    else model_files_put(&run->small_files, "tokenizer.json", path);
}

/* Finds the tokenizer: --tokenizer, else that of the model's folder, else that of the data if it goes with the model;
 * there may be none. */
static void choose_tokenizer(Run* run, const char* model_name)
{
    const Flags* f = run->flags;
    Config* c = &run->model.config;
    const bool is_preset = c->hf_text == nullptr;
    if (f->tokenizer[0]) {
        ENSURE(tokenizer_locate(f->tokenizer, run->tokenizer_path) ||
               path_exists(f->tokenizer, "", run->tokenizer_path), "--tokenizer %s: no such file", f->tokenizer);
    } else if (!tokenizer_locate(model_name, run->tokenizer_path) && !choose_data_tokenizer(run, is_preset)) {
        run->tokenizer_path[0] = 0;
    }
    if (is_preset && run->tokenizer_path[0]) {
        TokenizerEnds ends = tokenizer_ends(run->tokenizer_path);
        config_set_ends(c, ends.begin, ends.end);
    }
    if (run->comm.rank == 0 && (f->given[FLAG_export_] || f->out[0])) read_small_files(run, model_name);
}

static void tokenizer_open_held(void* run)
{
    ((Run*)run)->tokenizer = tokenizer_open(((Run*)run)->tokenizer_path);
}

/* Text needs it: a tokenizer that is not supported is refused before anything is loaded. Training does not: then there
 * is no sample, and the run says why. With --auto the stage that decides who generates is not known yet. */
static void open_tokenizer(Run* run, bool trains)
{
    const Flags* f = run->flags;
    const bool reads_text = f->given[FLAG_generate] || f->given[FLAG_prompts] || f->given[FLAG_choices];
    const bool samples = trains && !f->bench && run->has_val && f->sample_tokens > 0;
    const bool is_needed = f->given[FLAG_choices] || f->auto_ || f->zero == 3 || run->comm.rank < f->tp;
    if (!run->tokenizer_path[0] || !(reads_text || samples)) return;
    if (reads_text && is_needed) tokenizer_open_held(run);
    if (!samples) return;
    Outcome own = is_needed ? attempt(tokenizer_open_held, run, run->no_sample) : Outcome::WELL;
    if (comm_outcome(&run->comm, own, run->no_sample) == Outcome::WELL || run->tokenizer == nullptr) return;
    tokenizer_close(run->tokenizer);
    run->tokenizer = nullptr;
}

/* Prints it if checkpoints or the export will have none that this program reads. */
static void tokenizer_say(const Run* run, const char* model_name)
{
    if (!run->tokenizer_path[0])
        SAY("output  no tokenizer.json is written: none in %s%s; --tokenizer gives one\n", model_name,
            run->no_tokenizer);
}

/* Writes config.json, the tokenizer and the rest into a checkpoint, an export or the run folder. */
static void write_small_files(const char* folder, void* context)
{
    const Run* run = (const Run*)context;
    char file[4200];
    snprintf(file, sizeof file, "%s/config.json", folder);
    config_write(&run->model.whole, file, run->flags->export_dtype);
    model_files_write(&run->small_files, folder);
}

/* A tokenizer in a checkpoint of this run, which --keep may remove, is copied into the run folder, as are the files
 * beside it, and read there. */
static void tokenizer_keep(Run* run)
{
    char out[PATH_MAX], from[PATH_MAX];
    if (realpath(run->flags->out, out) == nullptr || realpath(run->tokenizer_path, from) == nullptr) return;
    const size_t n = strlen(out);
    if (strncmp(from, out, n) != 0 || strncmp(from + n, "/step_", 6) != 0) return;
    if (run->comm.rank == 0) model_files_write(&run->small_files, run->flags->out);
    char name[NAME_MAX + 1];
    snprintf(name, sizeof name, "%s", strrchr(run->tokenizer_path, '/') + 1);
    path_exists(run->flags->out, name, run->tokenizer_path);
}
