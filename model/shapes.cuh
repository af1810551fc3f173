/* shapes.cuh: the shape of a model: its axes, the families, the presets, and config.json of a Hugging Face folder, read
 * and written. What computes asks for the axes alone. A family is a name for some of their values: how config.json
 * spells them, and what its files call the tensors. A key of config.json that would change the numbers and is not
 * supported is refused by name. The tokens that end a text are those of config.json and of generation_config.json
 * beside it. The legend of the letters is in model.cuh. */
#pragma once
#include "data/flags.h"
#include "data/json.h"
#include "kernels/activation.cuh"
#include "kernels/matmul.cuh"
#include "kernels/rope.cuh"
#include "tensors.cuh"

#define CONFIG_MAX_EOS 64
#define CONFIG_MAX_LAYERS (1 << 12)

enum class Norm { LAYER, RMS };                // LayerNorm has a bias
enum class Positions { LEARNED, ROTARY };      // a vector added to the embedding; q and k rotated
enum class Mlp { PLAIN, GATED };               // down(activation(up(x))); down(activation(gate(x)) * up(x))

struct Family;

typedef struct Config {
    const struct Family* family;
    int V, VP, C, L, NH, NKV, HS, F;
    int context;            // largest T; learned positions: rows of wpe
    int window;             // of the layers that slide: positions back that a query sees, itself among them
    bool slides[CONFIG_MAX_LAYERS];    // does this layer have the window? In others a query sees all positions
    Norm norm;
    double eps;             // of the norms
    Positions positions;
    RopeConfig rope;        // rotary positions
    Mlp mlp;
    Activation activation;  // of the MLP; gated: of its gate
    Layout layout;          // of the weights of a block; the head's is (out, in) always
    bool tied;              // head = wte
    bool qkv_bias, proj_bias, mlp_bias;
    bool qk_norm;           // of each query and key head, before rotary embedding
    float pdrop;            // dropout that config.json names; printed, not applied
    int bos;                // the token that begins a text; -1: none
    int eos[CONFIG_MAX_EOS], num_eos;    // those that end one
    char* hf_text;          // config.json as it was read, for config_write; null for presets
    char notes[1024];       // what config.json says and the model does otherwise: lines to print
    int num_pieces, piece_rows;   // wte and the head as sub-units: model_tensors
    int num_front_units;    // of tensors in fp32, and with tensor parallelism of those that all ranks have whole
    int tp, tp_rank;        // tensor parallelism: ranks, and which of them has the sizes above (config_of_rank); 1, 0
    int vocab_first;        // the first of its VP rows of wte and head
    int kv_ranks;           // neighbouring ranks with the same key/value heads, each with a part of their weights; 1
} Config;

/* What the family's configuration class in transformers 5 takes for keys that config.json lacks; 0: what follows from
 * the others. test/golden/class_defaults.json has them from there. */
typedef struct { int V, C, L, NH, NKV, F, context, window, bos, eos; } ClassDefaults;     // bos, eos -1: none

/* The rows of `families`, below. */
typedef struct Family {
    const char *model_type, *architecture;     // in config.json
    const TensorRow* tensors;
    int num_tensors;
    void (*set_axes)(Config*);                 // before what config.json or a preset says
    void (*read)(Config*, const cJSON*, const char* path);
    void (*write)(cJSON*, const Config*);
    const char* context_key;                   // one more key for the context, which llama.cpp reads; or null
    ClassDefaults defaults;
} Family;

/* Sets what follows from the rest and refuses what no kernel can do; `from` names the preset or file. */
static void config_finish(Config* c, const char* from)
{
    if (c->NKV == 0) c->NKV = c->NH;
    ENSURE(c->HS > 0 || c->C % c->NH == 0, "%s: the width %d is not divisible by %d heads", from, c->C, c->NH);
    if (c->HS == 0) c->HS = c->C / c->NH;
    ENSURE(c->NH % c->NKV == 0, "%s: %d query heads cannot be shared out among %d key/value heads", from, c->NH,
           c->NKV);
    ENSURE(c->positions != Positions::ROTARY || c->HS % 2 == 0,
           "%s: head size %d is odd: rotary embedding rotates pairs", from, c->HS);
    c->VP = (int)round_up(c->V, 64);
    c->tp = c->kv_ranks = 1;
    if (c->F == 0) c->F = 4 * c->C;
}

// -------------------------------------------------------------------------------------------------------- families
static void gpt2_axes(Config* c)
{
    c->norm = Norm::LAYER;
    c->eps = 1e-5;
    c->positions = Positions::LEARNED;
    c->mlp = Mlp::PLAIN;
    c->activation = Activation::GELU_TANH;
    c->layout = Layout::IN_OUT;
    c->tied = c->qkv_bias = c->proj_bias = c->mlp_bias = true;
}

static void llama_axes(Config* c)
{
    c->norm = Norm::RMS;
    c->eps = 1e-6;
    c->positions = Positions::ROTARY;
    c->rope = RopeConfig{10000, RopeScaling::NONE, 1, 1, 4, 8192};
    c->mlp = Mlp::GATED;
    c->activation = Activation::SILU;
    c->layout = Layout::OUT_IN;
}

static void qwen2_axes(Config* c)
{
    llama_axes(c);
    c->qkv_bias = true;
}

static void qwen3_axes(Config* c)
{
    llama_axes(c);
    c->HS = 128;
    c->qk_norm = true;
}

static void arcee_axes(Config* c)
{
    llama_axes(c);
    c->eps = 1e-5;
    c->mlp = Mlp::PLAIN;
    c->activation = Activation::RELU2;
}

/* A line of c->notes. */
FORMAT(2, 3) static void config_note(Config* c, const char* fmt, ...)
{
    const size_t used = strlen(c->notes);
    va_list args;
    va_start(args, fmt);
    vsnprintf(c->notes + used, sizeof c->notes - used, fmt, args);
    va_end(args);
}

/* Without the key the class's default, which c has; null is refused. */
static int read_size(const cJSON* j, const char* key, int fallback, int max, const char* path)
{
    return json_get(j, key) == nullptr ? fallback : (int)json_int(j, key, 1, max, path);
}

/* null is not the class's default but 0. */
static int read_size_or_null(const cJSON* j, const char* key, int fallback, int max, const char* path)
{
    return json_get(j, key) != nullptr && !json_has(j, key) ? 0 : read_size(j, key, fallback, max, path);
}

/* Only SiLU is built into the gate. */
static void read_activation(Config* c, const cJSON* j, const char* key, const char* path)
{
    if (!json_has(j, key)) return;
    const char* name = json_string(j, key, path);
    const bool gated = c->mlp == Mlp::GATED;
    ENSURE(activation_find(&c->activation, name) && (!gated || c->activation == Activation::SILU),
           "%s: %s is \"%s\", have %s", path, key, name, gated ? "silu" : activation_names);
}

static void gpt2_read(Config* c, const cJSON* j, const char* path)
{
    c->C = read_size(j, "n_embd", c->C, 1 << 20, path);
    c->L = read_size(j, "n_layer", c->L, CONFIG_MAX_LAYERS, path);
    c->NH = read_size(j, "n_head", c->NH, 1 << 12, path);
    c->context = read_size(j, "n_positions", c->context, 1 << 24, path);
    c->F = (int)json_int_or(j, "n_inner", 0, 0, 1 << 24, path);
    c->eps = json_float_or(j, "layer_norm_epsilon", c->eps, 0, 1, path);
    c->tied = json_bool_or(j, "tie_word_embeddings", c->tied, path);
    read_activation(c, j, "activation_function", path);
    for (const char* key : {"attn_pdrop", "embd_pdrop", "resid_pdrop"}) {
        float p = (float)json_float_or(j, key, 0.1, 0, 1, path);
        if (p > c->pdrop) c->pdrop = p;
    }
    ENSURE(json_bool_or(j, "scale_attn_weights", true, path), "%s: scale_attn_weights false is not there yet", path);
    for (const char* key : {"scale_attn_by_inverse_layer_idx", "add_cross_attention"})
        ENSURE(!json_bool_or(j, key, false, path), "%s: %s true is not there yet", path, key);
}

/* An object that says something: null and {} do not. */
static bool rope_has(const cJSON* j, const char* key, const char* path)
{
    return json_has(j, key) && json_object(j, key, path)->child != nullptr;
}

/* As transformers 5 reads it: "rope_scaling" of its older files wins over "rope_parameters", and the base is that of
 * the object which is taken, else the one beside it. */
static void read_rope(Config* c, const cJSON* j, const char* path)
{
    RopeConfig* r = &c->rope;
    r->theta = json_float_or(j, "rope_theta", r->theta, 1, 1e12, path);
    const bool has_scaling = rope_has(j, "rope_scaling", path), has_parameters = rope_has(j, "rope_parameters", path);
    const char* key = has_scaling ? "rope_scaling" : "rope_parameters";
    const cJSON* p = has_scaling || has_parameters ? json_object(j, key, path) : nullptr;
    const double partial = json_float_or(p, "partial_rotary_factor",
                                         json_float_or(j, "partial_rotary_factor", 1, 0, 1, path), 0, 1, path);
    if (p != nullptr) r->theta = json_float_or(p, "rope_theta", r->theta, 1, 1e12, path);
    if (has_scaling && has_parameters)
        config_note(c, "config  %s: rope_scaling wins over rope_parameters, as in transformers: base %g\n", path,
                    r->theta);
    if (partial != 1)
        config_note(c, "config  %s: partial_rotary_factor is ignored, as in transformers' %s\n", path,
                    c->family->architecture);
    const cJSON* value;
    cJSON_ArrayForEach(value, p)
        ENSURE(!cJSON_IsObject(value), "%s: %s: parameters for \"%s\" alone are not there yet", path, key,
               value->string);
    if (p == nullptr) return;
    const char* type = json_string_or(p, "rope_type", json_string_or(p, "type", "default", path), path);
    if (strcmp(type, "default") == 0) return;
    if (strcmp(type, "linear") == 0) r->scaling = RopeScaling::LINEAR;
    else if (strcmp(type, "llama3") == 0) r->scaling = RopeScaling::LLAMA3;
    else die("%s: %s is of type \"%s\", have default, linear and llama3", path, key, type);
    ENSURE(partial == 1, "%s: partial_rotary_factor %g with %s of type \"%s\" is not there, nor in transformers", path,
           partial, key, type);
    r->factor = json_float(p, "factor", 1, 1e6, path);
    if (r->scaling == RopeScaling::LINEAR) return;
    r->low_freq_factor = json_float(p, "low_freq_factor", 1e-6, 1e6, path);
    r->high_freq_factor = json_float(p, "high_freq_factor", 1e-6, 1e6, path);
    r->context = (double)json_int_or(p, "original_max_position_embeddings", c->context, 1, 1 << 24, path);
    ENSURE(r->high_freq_factor > r->low_freq_factor, "%s: %s: high_freq_factor %g is not above low_freq_factor %g",
           path, key, r->high_freq_factor, r->low_freq_factor);
}

/* Sets c->slides by "layer_types", and returns how many slide; -1 without the key. */
static int read_layer_types(Config* c, const cJSON* j, const char* path)
{
    if (!json_has(j, "layer_types")) return -1;
    const cJSON *types = json_array(j, "layer_types", path), *item;
    int layer = 0, num_sliding = 0;
    cJSON_ArrayForEach(item, types) {
        const char* type = cJSON_IsString(item) ? item->valuestring : "?";
        const bool slides = strcmp(type, "sliding_attention") == 0;
        ENSURE(slides || strcmp(type, "full_attention") == 0,
               "%s: layer_types holds \"%s\", have full_attention and sliding_attention", path, type);
        if (layer < c->L) c->slides[layer++] = slides;
        num_sliding += slides;
    }
    return num_sliding;
}

/* Layers from `first` on have the window, the others not. */
static void config_slide_from(Config* c, int first)
{
    for (int layer = 0; layer < c->L; layer++) c->slides[layer] = layer >= first;
}

/* Of this layer; 0: none. */
static int config_window(const Config* c, int layer) { return c->slides[layer] ? c->window : 0; }

/* The keys of all families but GPT-2. */
static void read_llama_keys(Config* c, const cJSON* j, const char* path)
{
    c->C = read_size(j, "hidden_size", c->C, 1 << 20, path);
    c->L = read_size(j, "num_hidden_layers", c->L, CONFIG_MAX_LAYERS, path);
    c->NH = read_size(j, "num_attention_heads", c->NH, 1 << 12, path);
    c->NKV = read_size_or_null(j, "num_key_value_heads", c->NKV, 1 << 12, path);
    c->HS = (int)json_int_or(j, "head_dim", c->HS, 1, 1 << 12, path);
    c->F = read_size(j, "intermediate_size", c->F, 1 << 24, path);
    c->context = read_size(j, "max_position_embeddings", c->context, 1 << 24, path);
    c->eps = json_float_or(j, "rms_norm_eps", c->eps, 0, 1, path);
    c->tied = json_bool_or(j, "tie_word_embeddings", c->tied, path);
    read_activation(c, j, "hidden_act", path);
    read_rope(c, j, path);
}

/* Each layer has the window, whatever layer_types says, as in transformers. */
static void mistral_read(Config* c, const cJSON* j, const char* path)
{
    read_llama_keys(c, j, path);
    read_layer_types(c, j, path);
    c->window = read_size_or_null(j, "sliding_window", c->window, 1 << 30, path);
    config_slide_from(c, c->window > 0 ? 0 : c->L);
}

/* transformers' LLaMA has no windows, whatever config.json says. */
static void llama_read(Config* c, const cJSON* j, const char* path)
{
    read_llama_keys(c, j, path);
    c->qkv_bias = c->proj_bias = json_bool_or(j, "attention_bias", false, path);
    c->mlp_bias = json_bool_or(j, "mlp_bias", false, path);
    for (const char* key : {"sliding_window", "layer_types"})
        if (key[0] == 's' ? json_has(j, key) : read_layer_types(c, j, path) > 0)
            config_note(c, "config  %s: %s is ignored: attention is full, as in transformers' %s\n", path, key,
                        c->family->architecture);
    config_slide_from(c, c->L);
}

/* It names a window that it uses only if told to, in the layers that layer_types says, else in those from
 * max_window_layers on. */
static void qwen2_read(Config* c, const cJSON* j, const char* path)
{
    read_llama_keys(c, j, path);
    const int window = read_size_or_null(j, "sliding_window", c->window, 1 << 30, path);
    const bool uses = json_bool_or(j, "use_sliding_window", false, path) && window > 0;
    const int first = (int)json_int_or(j, "max_window_layers", 28, 0, CONFIG_MAX_LAYERS, path);
    const int num_sliding = read_layer_types(c, j, path);
    ENSURE(uses || num_sliding <= 0, "%s: layer_types holds \"sliding_attention\": it needs sliding_window, and "
           "use_sliding_window true", path);
    ENSURE(num_sliding == -1 || cJSON_GetArraySize(json_get(j, "layer_types")) == c->L,
           "%s: layer_types has %d items, num_hidden_layers is %d", path,
           cJSON_GetArraySize(json_get(j, "layer_types")), c->L);
    if (num_sliding == -1) config_slide_from(c, uses ? first : c->L);
    c->window = uses ? window : 0;
}

static void qwen3_read(Config* c, const cJSON* j, const char* path)
{
    qwen2_read(c, j, path);
    c->qkv_bias = c->proj_bias = json_bool_or(j, "attention_bias", false, path);
}

/* By its first name. */
static void write_activation(cJSON* j, const char* key, Activation activation)
{
    const char* names = activation_rows[(int)activation].names;
    char name[32];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(names, ","), names);
    json_add_string(j, key, name);
}

static void gpt2_write(cJSON* j, const Config* c)
{
    json_add_int(j, "n_positions", c->context);
    json_add_int(j, "n_embd", c->C);
    json_add_int(j, "n_layer", c->L);
    json_add_int(j, "n_head", c->NH);
    json_add_int(j, "n_inner", c->F);
    write_activation(j, "activation_function", c->activation);
    json_add_float(j, "layer_norm_epsilon", c->eps);
    for (const char* key : {"attn_pdrop", "embd_pdrop", "resid_pdrop"}) json_add_float(j, key, 0);
}

static void llama_write(cJSON* j, const Config* c)
{
    json_add_int(j, "max_position_embeddings", c->context);
    json_add_int(j, "hidden_size", c->C);
    json_add_int(j, "num_hidden_layers", c->L);
    json_add_int(j, "num_attention_heads", c->NH);
    json_add_int(j, "num_key_value_heads", c->NKV);
    json_add_int(j, "head_dim", c->HS);
    json_add_int(j, "intermediate_size", c->F);
    write_activation(j, "hidden_act", c->activation);
    json_add_float(j, "rms_norm_eps", c->eps);
    json_add_float(j, "rope_theta", c->rope.theta);
}

#define FAMILY_TENSORS(table) table, (int)(sizeof table / sizeof table[0])

static const Family families[] = {
    {"gpt2", "GPT2LMHeadModel", FAMILY_TENSORS(gpt2_tensors), gpt2_axes, gpt2_read, gpt2_write, "n_ctx",
     {50257, 768, 12, 12, 0, 0, 1024, 0, 50256, 50256}},
    {"llama", "LlamaForCausalLM", FAMILY_TENSORS(llama_tensors), llama_axes, llama_read, llama_write, nullptr,
     {32000, 4096, 32, 32, 0, 11008, 2048, 0, 1, 2}},
    {"mistral", "MistralForCausalLM", FAMILY_TENSORS(llama_tensors), llama_axes, mistral_read, llama_write, nullptr,
     {32000, 4096, 32, 32, 8, 14336, 131072, 4096, 1, 2}},
    {"qwen2", "Qwen2ForCausalLM", FAMILY_TENSORS(llama_tensors), qwen2_axes, qwen2_read, llama_write, nullptr,
     {151936, 4096, 32, 32, 32, 22016, 32768, 4096, -1, -1}},
    {"qwen3", "Qwen3ForCausalLM", FAMILY_TENSORS(llama_tensors), qwen3_axes, qwen3_read, llama_write, nullptr,
     {151936, 4096, 32, 32, 32, 22016, 32768, 4096, -1, -1}},
    {"arcee", "ArceeForCausalLM", FAMILY_TENSORS(llama_tensors), arcee_axes, llama_read, llama_write, nullptr,
     {32000, 2560, 32, 32, 0, 18432, 4096, 0, 128000, 128001}},
};

/* The axes of a family by its model_type; `from` names the preset or file. */
static Config config_family(const char* model_type, const char* from)
{
    char have[256] = "";
    Config c = {};
    for (const Family& family : families) {
        snprintf(have + strlen(have), sizeof have - strlen(have), "%s%s", have[0] ? ", " : "", family.model_type);
        if (strcmp(model_type, family.model_type) == 0) c.family = &family;
    }
    ENSURE(c.family != nullptr, "%s: model_type is \"%s\", have %s", from, model_type, have);
    c.family->set_axes(&c);
    return c;
}

static void config_take_defaults(Config* c)
{
    const ClassDefaults* d = &c->family->defaults;
    c->V = d->V; c->C = d->C; c->L = d->L; c->NH = d->NH; c->NKV = d->NKV; c->F = d->F;
    c->context = d->context;
    c->window = d->window;
}

// --------------------------------------------------------------------------------------------------------- presets
/* The published shapes, and the ids that begin and end a text in the published vocabulary. V 0: that of the data.
 * llama-60m is the small one of Zhao et al. 2024 (GaLore), llama-1b TinyLlama. */
typedef struct {
    const char *name, *model_type;
    int V, bos, eos, C, L, NH, NKV, F, context;
    double eps, theta;
    bool tied;
} Preset;

static const Preset presets[] = {
    {"gpt2",         "gpt2",  50257,   50256,  50256,   768, 12, 12, 12,  3072,   1024, 1e-5, 0,      true},
    {"gpt2-medium",  "gpt2",  50257,   50256,  50256,  1024, 24, 16, 16,  4096,   1024, 1e-5, 0,      true},
    {"gpt2-large",   "gpt2",  50257,   50256,  50256,  1280, 36, 20, 20,  5120,   1024, 1e-5, 0,      true},
    {"gpt2-xl",      "gpt2",  50257,   50256,  50256,  1600, 48, 25, 25,  6400,   1024, 1e-5, 0,      true},
    {"llama-60m",    "llama", 0,          -1,     -1,   512,  8,  8,  8,  1376,   1024, 1e-6, 10000,  false},
    {"llama-1b",     "llama", 32000,       1,      2,  2048, 22, 32,  4,  5632,   2048, 1e-5, 10000,  false},
    {"llama2-7b",    "llama", 32000,       1,      2,  4096, 32, 32, 32, 11008,   4096, 1e-5, 10000,  false},
    {"llama3-8b",    "llama", 128256, 128000, 128001,  4096, 32, 32,  8, 14336,   8192, 1e-5, 500000, false},
    {"qwen2.5-0.5b", "qwen2", 151936, 151643, 151643,   896, 24, 14,  2,  4864,  32768, 1e-6, 1e6,    true},
    {"qwen2.5-1.5b", "qwen2", 151936, 151643, 151643,  1536, 28, 12,  2,  8960, 131072, 1e-6, 1e6,    true},
    {"qwen3-0.6b",   "qwen3", 151936, 151643, 151645,  1024, 28, 16,  8,  3072,  40960, 1e-6, 1e6,    true},
    {"qwen3-1.7b",   "qwen3", 151936, 151643, 151645,  2048, 28, 16,  8,  6144,  40960, 1e-6, 1e6,    true},
    {"qwen3-4b",     "qwen3", 151936, 151643, 151645,  2560, 36, 32,  8,  9728,  40960, 1e-6, 1e6,    true},
    {"qwen3-8b",     "qwen3", 151936, 151643, 151645,  4096, 36, 32,  8, 12288,  40960, 1e-6, 1e6,    false},
    {"qwen3-14b",    "qwen3", 151936, 151643, 151645,  5120, 40, 40,  8, 17408,  40960, 1e-6, 1e6,    false},
    {"qwen3-32b",    "qwen3", 151936, 151643, 151645,  5120, 64, 64,  8, 25600,  40960, 1e-6, 1e6,    false},
};

/* What -m takes beside folders, for a message. */
static void preset_names(char (&text)[512])
{
    text[0] = 0;
    for (const Preset& p : presets) snprintf(text + strlen(text), sizeof text - strlen(text), "%s ", p.name);
    snprintf(text + strlen(text), sizeof text - strlen(text), "d2..d48");
}

/* The ids that begin and end a text, of a tokenizer or of a preset's row; one outside of the vocabulary is none. */
static void config_set_ends(Config* c, int bos, int eos)
{
    c->bos = bos < c->V ? bos : -1;
    c->eos[0] = eos;
    c->num_eos = eos >= 0 && eos < c->V;
}

/* A preset of the table, or d2 to d48: GPT-2 of depth d, width 64*d, d heads, for the vocabulary of the data.
 * context 0: the preset's. Returns false if the name is none. */
static bool config_preset(Config* c, const char* name, int data_V, int context)
{
    int depth = 0, end = 0;
    for (const Preset& p : presets) {
        if (strcmp(name, p.name) != 0) continue;
        *c = config_family(p.model_type, name);
        c->V = p.V > 0 ? p.V : data_V > 0 ? data_V : 32000;
        c->C = p.C; c->L = p.L; c->NH = p.NH; c->NKV = p.NKV; c->F = p.F;
        c->context = context > p.context ? context : p.context;
        c->eps = p.eps;
        c->rope.theta = p.theta;
        c->tied = p.tied;
        config_set_ends(c, p.bos, p.eos);
        config_finish(c, name);
        return true;
    }
    if (sscanf(name, "d%d%n", &depth, &end) != 1 || name[end] != 0 || depth < 2 || depth > 48) return false;
    *c = config_family("gpt2", name);
    c->L = c->NH = depth;
    c->C = 64 * depth;
    c->V = data_V > 0 ? data_V : 50257;
    c->context = context > 0 ? context : 256;
    const int end_of_text = c->V == 50257 ? 50256 : -1;              // GPT-2's vocabulary
    config_set_ends(c, end_of_text, end_of_text);
    config_finish(c, name);
    return true;
}

/* "eos_token_id": an id, a list of them, or null. */
static void config_add_eos(Config* c, const cJSON* j, const char* path)
{
    const cJSON *eos = json_get(j, "eos_token_id"), *item = cJSON_IsArray(eos) ? eos->child : eos;
    for (; item != nullptr; item = cJSON_IsArray(eos) ? item->next : nullptr) {
        bool known = !cJSON_IsNumber(item) || item->valueint < 0 || item->valueint >= c->V;
        for (int i = 0; i < c->num_eos; i++) known = known || c->eos[i] == item->valueint;
        if (known) continue;
        ENSURE(c->num_eos < CONFIG_MAX_EOS, "%s: more than %d tokens end a text", path, CONFIG_MAX_EOS);
        c->eos[c->num_eos++] = item->valueint;
    }
}

/* A chat model's turns end with a token that often only generation_config.json has. Without that file and the key the
 * class's token ends a text. */
static void config_read_eos(Config* c, const cJSON* j, const char* path)
{
    char beside[4200];
    const char* slash = strrchr(path, '/');
    snprintf(beside, sizeof beside, "%.*sgeneration_config.json", slash != nullptr ? (int)(slash + 1 - path) : 0, path);
    config_add_eos(c, j, path);
    const int eos = c->family->defaults.eos;
    if (!file_exists(beside)) {
        if (json_get(j, "eos_token_id") == nullptr && eos >= 0 && eos < c->V) c->eos[c->num_eos++] = eos;
        return;
    }
    cJSON* generation = json_parse_file(beside);
    config_add_eos(c, generation, beside);
    cJSON_Delete(generation);
}

/* Says which keys are not read and look like one that is, and is missing: mistyped, they would change the model. */
static void config_say_unknown(Config* c, const cJSON* j, const JsonAsked* asked, const char* path)
{
    const cJSON* item;
    cJSON_ArrayForEach(item, j) {
        Nearest nearest = nearest_begin(item->string);
        bool is_read = false;
        for (int i = 0; i < asked->count && !is_read; i++) {
            is_read = strcmp(asked->keys[i], item->string) == 0;
            if (json_get(j, asked->keys[i]) == nullptr) nearest_offer(&nearest, asked->keys[i]);
        }
        if (!is_read && nearest.nearest[0] && nearest.distance <= 2)
            config_note(c, "config  %s: the key \"%.60s\" is not read: did you mean %s, which is missing?\n", path,
                        item->string, nearest.nearest);
    }
}

/* From a Hugging Face config.json. What would change the numbers and is not built is refused by name. */
static void config_read(Config* c, const char* path)
{
    cJSON* j = json_parse_file(path);
    JsonAsked asked = {j, {}, 0};
    json_asked = &asked;
    const char* type = json_string(j, "model_type", path);
    *c = config_family(type, path);
    config_take_defaults(c);
    c->family->read(c, j, path);
    c->V = read_size(j, "vocab_size", c->V, 1 << 24, path);
    config_read_eos(c, j, path);
    const cJSON* bos = json_get(j, "bos_token_id");
    c->bos = bos == nullptr ? c->family->defaults.bos : cJSON_IsNumber(bos) ? bos->valueint : -1;
    if (c->bos >= c->V) c->bos = -1;
    json_asked = nullptr;
    config_say_unknown(c, j, &asked, path);
    cJSON_Delete(j);
    size_t length;
    c->hf_text = file_read(path, &length);
    config_finish(c, path);
}

static void config_add_id(cJSON* j, const char* key, int id)
{
    if (id >= 0) json_add_int(j, key, id);
    else json_added(cJSON_AddNullToObject(j, key), key);     // else transformers takes the published model's
}

/* A preset's config.json. */
static void config_write_preset(const Config* c, const char* path, const char* torch_dtype)
{
    cJSON* j = json_new_object();
    cJSON_AddItemToArray(json_add_array(j, "architectures"), cJSON_CreateString(c->family->architecture));
    json_add_string(j, "model_type", c->family->model_type);
    json_add_int(j, "vocab_size", c->V);
    c->family->write(j, c);
    if (c->family->context_key != nullptr) json_add_int(j, c->family->context_key, c->context);
    json_add_bool(j, "tie_word_embeddings", c->tied);
    json_add_float(j, "initializer_range", 0.02);
    config_add_id(j, "bos_token_id", c->bos);
    config_add_id(j, "eos_token_id", c->num_eos > 0 ? c->eos[0] : -1);
    json_add_string(j, "torch_dtype", torch_dtype);
    hold(j, json_delete_held);
    json_write_file(path, j);
    give_back(j);
}

/* The config as config.json, true of the weights beside it. What was read is written byte for byte but for the type of
 * the weights (transformers would round to it), a quantization that they do not have, code that is not copied, the
 * class of the weights' names, a tie that the head does not have, and GPT-2's n_ctx, which llama.cpp needs. dtype
 * is fp32, bf16 or fp16. */
static void config_write(const Config* c, const char* path, const char* dtype)
{
    const char* torch_dtype = strcmp(dtype, "bf16") == 0 ? "bfloat16" : strcmp(dtype, "fp16") == 0 ? "float16"
                              : "float32";
    if (c->hf_text == nullptr) {
        config_write_preset(c, path, torch_dtype);
        return;
    }
    char quoted[24], architectures[40], context[16];
    snprintf(quoted, sizeof quoted, "\"%s\"", torch_dtype);
    snprintf(architectures, sizeof architectures, "[\"%s\"]", c->family->architecture);
    snprintf(context, sizeof context, "%d", c->context);
    cJSON* j = json_parse(c->hf_text, strlen(c->hf_text), path);
    const cJSON* first = cJSON_GetArrayItem(json_get(j, "architectures"), 0);
    const char* says = cJSON_IsString(first) ? first->valuestring : "";
    const bool same = strcmp(says, c->family->architecture) == 0;
    const bool ties = config_family(c->family->model_type, path).tied;
    const bool unties = !c->tied && json_bool_or(j, "tie_word_embeddings", ties, path);
    cJSON_Delete(j);
    int num_edits = 5;
    JsonEdit edits[8] = {
        {"dtype", quoted, false}, {"torch_dtype", quoted, false}, {"quantization_config", nullptr, false},
        {"compression_config", nullptr, false}, {"auto_map", nullptr, false},
    };
    if (c->family->context_key != nullptr) edits[num_edits++] = JsonEdit{c->family->context_key, context, true};
    if (unties) edits[num_edits++] = JsonEdit{"tie_word_embeddings", "false", true};
    if (!same) edits[num_edits++] = JsonEdit{"architectures", architectures, true};
    JsonText t = {nullptr, 0, 0};
    json_text_edit(&t, c->hf_text, edits, num_edits);
    hold(t.text);
    file_write(path, t.text, t.length);
    give_back(t.text);
}
