"""Writes test/golden/class_defaults.json: what transformers' configuration classes take for the keys of config.json
that train_gpt reads. Needs transformers (5.24 made the file): python dev/class_defaults.py"""
import json
import pathlib

import transformers

ROOT = pathlib.Path(__file__).resolve().parent.parent
GPT2 = ("vocab_size n_embd n_layer n_head n_positions n_inner layer_norm_epsilon activation_function "
        "tie_word_embeddings attn_pdrop embd_pdrop resid_pdrop scale_attn_weights scale_attn_by_inverse_layer_idx "
        "add_cross_attention bos_token_id eos_token_id").split()
LLAMA = ("vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
         "max_position_embeddings rms_norm_eps hidden_act tie_word_embeddings rope_parameters attention_bias mlp_bias "
         "sliding_window use_sliding_window max_window_layers bos_token_id eos_token_id").split()

table, others = {}, {}
for family in ("gpt2", "llama", "mistral", "qwen2", "qwen3", "arcee"):
    # The window is None in an object that does not use it: of the class itself.
    config = transformers.AutoConfig.for_model(family)
    keys = GPT2 if family == "gpt2" else LLAMA
    table[family] = {key: getattr(config, key) for key in keys if hasattr(config, key)}
    if "use_sliding_window" in table[family]:
        table[family]["sliding_window"] = type(config).sliding_window
    others[family] = sorted(set(config.to_dict()) - set(keys) - {"model_type"})     # those it writes and we do not read
text = json.dumps({"transformers": transformers.__version__, "classes": table, "others": others}, indent=1)
(ROOT / "test" / "golden" / "class_defaults.json").write_text(text + "\n")
