/* tensors.cuh: the tensors of a model's file, one row each, by the names that each family gives them: the only lists of
 * tensors. Which of them a model has depends on its axes (config_has in units.cuh): one list serves models with and
 * without biases, with and without a gate. */
#pragma once

enum class Dim { ONE, V, CONTEXT, C, Q, KV, QKV, HS, F, GATE };    // GATE: F where the MLP is gated, else 0
enum class Where { EMBED, BLOCK, HEAD };
enum class Init { NORMAL, RESIDUAL, ZERO, ONE };   // N(0, 0.02); N(0, 0.02 / sqrt(2L)); constants

/* What the code calls the matrices and vectors of a unit. A bias follows its weight. */
enum Row {
    WTE, WPE,
    NORM_1_WEIGHT, NORM_1_BIAS, QKV_WEIGHT, QKV_BIAS, Q_NORM_WEIGHT, K_NORM_WEIGHT, PROJ_WEIGHT, PROJ_BIAS,
    NORM_2_WEIGHT, NORM_2_BIAS, FC_WEIGHT, FC_BIAS, FCPROJ_WEIGHT, FCPROJ_BIAS,
    NORM_F_WEIGHT, NORM_F_BIAS, LM_HEAD, NUM_ROWS
};

/* Each tensor of the file. Those that follow each other with the same row are stored joined, one matrix to the code:
 * q, k and v one above the other are the (Q + 2 KV, C) matrix that makes all three. */
typedef struct { Row row; Where where; const char* name; Dim rows, cols; Init init; } TensorRow;

static const TensorRow gpt2_tensors[] = {
    {WTE,           Where::EMBED, "transformer.wte.weight",              Dim::V,       Dim::C,   Init::NORMAL},
    {WPE,           Where::EMBED, "transformer.wpe.weight",              Dim::CONTEXT, Dim::C,   Init::NORMAL},
    {NORM_1_WEIGHT, Where::BLOCK, "transformer.h.%d.ln_1.weight",        Dim::C,       Dim::ONE, Init::ONE},
    {NORM_1_BIAS,   Where::BLOCK, "transformer.h.%d.ln_1.bias",          Dim::C,       Dim::ONE, Init::ZERO},
    {QKV_WEIGHT,    Where::BLOCK, "transformer.h.%d.attn.c_attn.weight", Dim::C,       Dim::QKV, Init::NORMAL},
    {QKV_BIAS,      Where::BLOCK, "transformer.h.%d.attn.c_attn.bias",   Dim::QKV,     Dim::ONE, Init::ZERO},
    {PROJ_WEIGHT,   Where::BLOCK, "transformer.h.%d.attn.c_proj.weight", Dim::Q,       Dim::C,   Init::RESIDUAL},
    {PROJ_BIAS,     Where::BLOCK, "transformer.h.%d.attn.c_proj.bias",   Dim::C,       Dim::ONE, Init::ZERO},
    {NORM_2_WEIGHT, Where::BLOCK, "transformer.h.%d.ln_2.weight",        Dim::C,       Dim::ONE, Init::ONE},
    {NORM_2_BIAS,   Where::BLOCK, "transformer.h.%d.ln_2.bias",          Dim::C,       Dim::ONE, Init::ZERO},
    {FC_WEIGHT,     Where::BLOCK, "transformer.h.%d.mlp.c_fc.weight",    Dim::C,       Dim::F,   Init::NORMAL},
    {FC_BIAS,       Where::BLOCK, "transformer.h.%d.mlp.c_fc.bias",      Dim::F,       Dim::ONE, Init::ZERO},
    {FCPROJ_WEIGHT, Where::BLOCK, "transformer.h.%d.mlp.c_proj.weight",  Dim::F,       Dim::C,   Init::RESIDUAL},
    {FCPROJ_BIAS,   Where::BLOCK, "transformer.h.%d.mlp.c_proj.bias",    Dim::C,       Dim::ONE, Init::ZERO},
    {NORM_F_WEIGHT, Where::HEAD,  "transformer.ln_f.weight",             Dim::C,       Dim::ONE, Init::ONE},
    {NORM_F_BIAS,   Where::HEAD,  "transformer.ln_f.bias",               Dim::C,       Dim::ONE, Init::ZERO},
    {LM_HEAD,       Where::HEAD,  "lm_head.weight",                      Dim::V,       Dim::C,   Init::NORMAL},
};

static const TensorRow llama_tensors[] = {
    {WTE,           Where::EMBED, "model.embed_tokens.weight",                       Dim::V,    Dim::C,   Init::NORMAL},
    {NORM_1_WEIGHT, Where::BLOCK, "model.layers.%d.input_layernorm.weight",          Dim::C,    Dim::ONE, Init::ONE},
    {QKV_WEIGHT,    Where::BLOCK, "model.layers.%d.self_attn.q_proj.weight",         Dim::Q,    Dim::C,   Init::NORMAL},
    {QKV_WEIGHT,    Where::BLOCK, "model.layers.%d.self_attn.k_proj.weight",         Dim::KV,   Dim::C,   Init::NORMAL},
    {QKV_WEIGHT,    Where::BLOCK, "model.layers.%d.self_attn.v_proj.weight",         Dim::KV,   Dim::C,   Init::NORMAL},
    {QKV_BIAS,      Where::BLOCK, "model.layers.%d.self_attn.q_proj.bias",           Dim::Q,    Dim::ONE, Init::ZERO},
    {QKV_BIAS,      Where::BLOCK, "model.layers.%d.self_attn.k_proj.bias",           Dim::KV,   Dim::ONE, Init::ZERO},
    {QKV_BIAS,      Where::BLOCK, "model.layers.%d.self_attn.v_proj.bias",           Dim::KV,   Dim::ONE, Init::ZERO},
    {Q_NORM_WEIGHT, Where::BLOCK, "model.layers.%d.self_attn.q_norm.weight",         Dim::HS,   Dim::ONE, Init::ONE},
    {K_NORM_WEIGHT, Where::BLOCK, "model.layers.%d.self_attn.k_norm.weight",         Dim::HS,   Dim::ONE, Init::ONE},
    {PROJ_WEIGHT,   Where::BLOCK, "model.layers.%d.self_attn.o_proj.weight",         Dim::C,    Dim::Q,   Init::NORMAL},
    {PROJ_BIAS,     Where::BLOCK, "model.layers.%d.self_attn.o_proj.bias",           Dim::C,    Dim::ONE, Init::ZERO},
    {NORM_2_WEIGHT, Where::BLOCK, "model.layers.%d.post_attention_layernorm.weight", Dim::C,    Dim::ONE, Init::ONE},
    {FC_WEIGHT,     Where::BLOCK, "model.layers.%d.mlp.gate_proj.weight",            Dim::GATE, Dim::C,   Init::NORMAL},
    {FC_WEIGHT,     Where::BLOCK, "model.layers.%d.mlp.up_proj.weight",              Dim::F,    Dim::C,   Init::NORMAL},
    {FC_BIAS,       Where::BLOCK, "model.layers.%d.mlp.gate_proj.bias",              Dim::GATE, Dim::ONE, Init::ZERO},
    {FC_BIAS,       Where::BLOCK, "model.layers.%d.mlp.up_proj.bias",                Dim::F,    Dim::ONE, Init::ZERO},
    {FCPROJ_WEIGHT, Where::BLOCK, "model.layers.%d.mlp.down_proj.weight",            Dim::C,    Dim::F,   Init::NORMAL},
    {FCPROJ_BIAS,   Where::BLOCK, "model.layers.%d.mlp.down_proj.bias",              Dim::C,    Dim::ONE, Init::ZERO},
    {NORM_F_WEIGHT, Where::HEAD,  "model.norm.weight",                               Dim::C,    Dim::ONE, Init::ONE},
    {LM_HEAD,       Where::HEAD,  "lm_head.weight",                                  Dim::V,    Dim::C,   Init::NORMAL},
};
