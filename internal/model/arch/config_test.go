package arch_test

import (
	"encoding/json"
	"maps"
	"reflect"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
)

// configWith is a llama config.json with changed keys; nil removes one.
func configWith(t *testing.T, change map[string]any) []byte {
	t.Helper()
	c := modeltest.Tiny("llama")
	c.MaxPositions = 1024
	j := modeltest.ConfigJSON(c, kernels.F32)
	maps.Copy(j, change)
	maps.DeleteFunc(j, func(_ string, v any) bool { return v == nil })
	b, err := json.Marshal(j)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestParseConfig(t *testing.T) {
	f := func(name string, change map[string]any, want func(*arch.Config)) {
		t.Run(name, func(t *testing.T) {
			c := modeltest.Tiny("llama")
			c.MaxPositions = 1024
			want(&c)
			got, err := arch.ReadHF(configWith(t, change))
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, c) {
				t.Errorf("got\n%+v, want\n%+v", got, c)
			}
		})
	}
	type m = map[string]any
	f("defaults", m{"num_key_value_heads": nil, "head_dim": nil, "rms_norm_eps": nil, "rope_theta": nil, "bos_token_id": nil, "eos_token_id": nil, "tie_word_embeddings": nil},
		func(c *arch.Config) { c.KVHeads, c.NormEps, c.BOS, c.EOS = 4, 1e-6, nil, nil })
	f("one end id", m{"eos_token_id": 7}, func(c *arch.Config) { c.EOS = []int32{7} })
	f("null window", m{"model_type": "mistral", "sliding_window": json.RawMessage("null")}, func(c *arch.Config) { c.ModelType = "mistral" })
	f("wide window", m{"model_type": "mistral", "sliding_window": 1024}, func(c *arch.Config) { c.ModelType = "mistral" })
	f("smollm", m{"model_type": "smollm"}, func(*arch.Config) {})
	f("window switched off", m{"model_type": "qwen2", "use_sliding_window": false, "sliding_window": 16},
		func(c *arch.Config) { c.ModelType, c.QKVBias = "qwen2", true })
	f("qwen2 never loses its bias", m{"model_type": "qwen2", "attention_bias": false}, func(c *arch.Config) { c.ModelType, c.QKVBias = "qwen2", true })
	f("qwen3 head_dim", m{"model_type": "qwen3", "head_dim": nil}, func(c *arch.Config) { c.ModelType, c.QKNorm, c.HeadDim = "qwen3", true, 128 })
	f("legacy linear", m{"rope_scaling": m{"type": "linear", "factor": 2.0}}, func(c *arch.Config) {
		c.Rope, c.MaxPositions = arch.RopeScaling{Kind: "linear", Factor: 2}, 2048
	})
	f("rope_parameters", m{"rope_theta": nil, "rope_parameters": m{"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}},
		func(c *arch.Config) {
			c.RopeTheta = 5e5
			c.Rope = arch.RopeScaling{Kind: "llama3", Factor: 8, LowFreqFactor: 1, HighFreqFactor: 4, OriginalMaxPos: 512}
		})
	f("rope_parameters default", m{"rope_parameters": m{"rope_theta": 7, "rope_type": "default"}}, func(c *arch.Config) { c.RopeTheta = 7 })
	f("yarn", m{"rope_scaling": m{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 24, "mscale": 0.7, "truncate": false}},
		func(c *arch.Config) {
			c.Rope = arch.RopeScaling{Kind: "yarn", Factor: 4, OriginalMaxPos: 1024, BetaFast: 24, MScale: 0.7, NoTruncate: true}
			c.MaxPositions = 4096
		})
	f("yarn of all", m{"rope_scaling": m{"type": "yarn", "factor": 2}}, func(c *arch.Config) {
		c.Rope, c.MaxPositions = arch.RopeScaling{Kind: "yarn", Factor: 2, OriginalMaxPos: 1024}, 2048
	})
}

func TestParseConfigRefuses(t *testing.T) {
	f := func(want string, change map[string]any) {
		t.Helper()
		_, err := arch.ReadHF(configWith(t, change))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: error %v, want one with %q", change, err, want)
		}
	}
	type m = map[string]any
	f(`model_type "gemma2" is not supported (llama`, m{"model_type": "gemma2"})
	f("model_type", m{"model_type": nil})
	f("hidden_act", m{"hidden_act": "gelu"})
	f("mlp_bias", m{"mlp_bias": true})
	f("quantization_config", m{"quantization_config": m{"quant_method": "gptq"}})
	f("sliding_window 16", m{"use_sliding_window": true, "sliding_window": 16})
	f("sliding_window 16", m{"model_type": "mistral", "sliding_window": 16})
	f("layer_types", m{"layer_types": []string{"full_attention", "sliding_attention"}})
	f("partial_rotary_factor", m{"partial_rotary_factor": 0.5})
	f("partial_rotary_factor", m{"rope_parameters": m{"rope_type": "default", "partial_rotary_factor": 0.5}})
	f(`type "dynamic"`, m{"rope_scaling": m{"type": "dynamic", "factor": 2}})
	f(`type "longrope"`, m{"rope_scaling": m{"rope_type": "longrope"}})
	f("original_max_position_embeddings", m{"rope_scaling": m{"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}})
	f("low_freq_factor", m{"rope_scaling": m{"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 8}})
	f("factor", m{"rope_scaling": m{"type": "linear"}})
	for _, c := range []struct {
		want string
		m
	}{{"sliding_window 0", m{"sliding_window": 0}}, {"sliding_window -1", m{"sliding_window": -1}}, {"sliding_window_pattern 0", m{"sliding_window_pattern": 0}},
		{"layer_types: 1 for 2", m{"layer_types": []string{"full_attention"}}}, {"layer_types: layer 1", m{"layer_types": []string{"full_attention", "sliding_attention"}}},
		{"hidden_activation", m{"hidden_activation": "relu"}}, {"query_pre_attn_scalar", m{"query_pre_attn_scalar": 0}}, {"softcapping", m{"final_logit_softcapping": 30.0}},
		{"use_bidirectional_attention", m{"use_bidirectional_attention": true}}} {
		c.m["model_type"] = "gemma3_text"
		f(c.want, c.m)
	}
	for _, c := range []struct {
		want, family string
		m
	}{
		{"attention_bias", "deepseek_v2", m{"attention_bias": true}}, {"rope_interleave", "deepseek_v3", m{"rope_interleave": false}},
		{"moe_layer_freq 2", "deepseek_v2", m{"moe_layer_freq": 2}}, {"norm_topk_prob", "deepseek_v2", m{"norm_topk_prob": true}},
		{"topk_method \"noaux_tc\"", "deepseek_v2", m{"topk_method": "noaux_tc"}}, {"topk_method \"greedy\"", "deepseek_v3", m{"topk_method": "greedy"}},
		{"scoring_func \"sigmoid\"", "deepseek_v2", m{"scoring_func": "sigmoid"}}, {"scoring_func \"softmax\"", "deepseek_v3", m{"scoring_func": "softmax"}},
		{"routed_scaling_factor 0", "deepseek_v3", m{"routed_scaling_factor": 0}}, {"first_k_dense_replace 3", "deepseek_v3", m{"first_k_dense_replace": 3}},
		{"n_group 3", "deepseek_v3", m{"n_group": 3}}, {"n_group 8", "deepseek_v3", m{"n_group": 8}}, {"topk_group 5", "deepseek_v3", m{"topk_group": 5}},
		{"topk_group 1 of 4 groups has no 3 experts", "deepseek_v3", m{"topk_group": 1}}, {"n_shared_experts -1", "deepseek_v2", m{"n_shared_experts": -1}},
		{"kv_lora_rank 0", "deepseek_v2", m{"kv_lora_rank": 0}}, {"q_lora_rank -1", "deepseek_v2", m{"q_lora_rank": -1}},
		{"qk_rope_head_dim 7", "deepseek_v3", m{"qk_rope_head_dim": 7, "qk_nope_head_dim": 17}}, {"qk_nope_head_dim 0", "deepseek_v3", m{"qk_nope_head_dim": 0}},
		{"v_head_dim 20000", "deepseek_v3", m{"v_head_dim": 20000}}, {"num_nextn_predict_layers -1", "deepseek_v3", m{"num_nextn_predict_layers": -1}},
		{"moe_intermediate_size", "deepseek_v3", m{"moe_intermediate_size": nil}}, {"num_experts_per_tok", "deepseek_v2", m{"num_experts_per_tok": 9}},
	} {
		j := modeltest.ConfigJSON(modeltest.Tiny(c.family), kernels.F32)
		maps.Copy(j, c.m)
		maps.DeleteFunc(j, func(_ string, v any) bool { return v == nil })
		f(c.want, j)
	}
	f("num_experts", m{"model_type": "qwen3_moe"})
	f("decoder_sparse_step", m{"model_type": "qwen3_moe", "num_experts": 4, "decoder_sparse_step": 2})
	f("num_experts_per_tok", m{"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5})
	f("number of layers 0", m{"num_hidden_layers": nil})
	f("number of layers", m{"num_hidden_layers": 1 << 30})
	f("hidden_size", m{"hidden_size": "64"})
	f("not a multiple", m{"num_key_value_heads": 3})
	f("odd", m{"head_dim": 15})
	f("head_dim", m{"head_dim": nil, "hidden_size": 63})
	f("epsilon", m{"rms_norm_eps": 0})
	f("theta", m{"rope_theta": -1})
	f("maximum position", m{"max_position_embeddings": nil})
	f("token id", m{"eos_token_id": m{}})
	f("token id", m{"bos_token_id": -3})
}

func TestQuantizationConfig(t *testing.T) {
	type m = map[string]any
	f := func(want string, q m) {
		t.Helper()
		_, err := arch.ReadHF(configWith(t, m{"quantization_config": q}))
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%v: %v, want %q", q, err, want)
		}
	}
	weights := func(bits int, kind, strategy string) m {
		return m{"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": m{"group_0": m{"weights": m{"num_bits": bits, "type": kind, "strategy": strategy}}}}
	}
	f("", m{"quant_method": "fp8", "activation_scheme": "static"})
	f("", weights(8, "float", "tensor"))
	f("", weights(8, "float", "channel"))
	f("", m{"quant_method": "fp8", "weight_block_size": []int{128, 128}})
	f("weight_block_size [64,128]", m{"quant_method": "fp8", "weight_block_size": []int{64, 128}})
	f("weight_block_size 128", m{"quant_method": "fp8", "weight_block_size": 128})
	f("group_0", weights(4, "float", "channel"))
	f("group_0", weights(8, "int", "channel"))
	f("group_0", weights(8, "float", "group"))
	f(`method "gptq"`, m{"quant_method": "gptq"})
	f(`method "compressed-tensors"`, m{"quant_method": "compressed-tensors"})
	f("quantization_config", m{"quant_method": 3})
}

// What DeepSeek's own files lack, or have as null, is what transformers takes it for.
func TestDeepSeekDefaults(t *testing.T) {
	read := func(family string, change map[string]any) arch.Config {
		t.Helper()
		j := modeltest.ConfigJSON(modeltest.Tiny(family), kernels.F32)
		maps.Copy(j, change)
		maps.DeleteFunc(j, func(_ string, v any) bool { return v == nil })
		c, err := arch.ReadHF(configWith(t, j))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	type m = map[string]any
	null := json.RawMessage("null")
	c := read("deepseek_v3", m{"q_lora_rank": nil, "routed_scaling_factor": nil, "norm_topk_prob": nil, "topk_method": nil, "scoring_func": nil, "num_nextn_predict_layers": nil, "num_mtp_layers": 2})
	if c.QRank != 1536 || c.RoutedScale != 2.5 || !c.NormExperts || c.Routing != arch.SigmoidBias || c.DraftLayers != 2 {
		t.Errorf("%+v", c)
	}
	c = read("deepseek_v2", m{"q_lora_rank": null, "routed_scaling_factor": null, "n_group": null, "topk_group": null, "topk_method": nil})
	if c.QRank != 0 || c.RoutedScale != 1 || c.NormExperts || c.ExpertGroups != 0 || c.Routing != arch.SoftmaxTop {
		t.Errorf("%+v", c)
	}
	c = read("deepseek_v2", m{"n_routed_experts": null})
	for l := range c.Layers {
		if _, feed := c.Layer(l); feed != arch.SwiGLU {
			t.Errorf("no experts, and layer %d is a %s", l, feed)
		}
	}
}

// TestDrafts: tensors of the layers behind the model's are a draft's, and no others.
func TestDrafts(t *testing.T) {
	c := arch.Config{Layers: 61, DraftLayers: 1}
	for name, want := range map[string]bool{"model.layers.61.eh_proj.weight": true, "model.layers.61.mlp.experts.3.up_proj.weight": true,
		"model.layers.60.eh_proj.weight": false, "model.layers.62.eh_proj.weight": false, "model.layers.x.eh_proj.weight": false, "model.embed_tokens.weight": false} {
		if got := c.Drafts(name); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
