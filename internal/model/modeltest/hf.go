package modeltest

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sync/errgroup"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
)

// HFOptions say how WriteHF writes.
type HFOptions struct {
	Seed   uint64
	DType  kernels.DType     // of every tensor
	Shards int               // > 1: that many files and an index
	Files  map[string][]byte // more files, such as tokenizer.json
}

// WriteHF makes dir a Hugging Face directory of a model with c's shape. It writes as many
// files at once as there are processors, each with one tensor in memory.
func WriteHF(dir string, c arch.Config, o HFOptions) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	cfg, err := json.MarshalIndent(ConfigJSON(c, o.DType), "", "  ")
	if err != nil {
		return err
	}
	files := map[string][]byte{"config.json": cfg}
	maps.Copy(files, o.Files)
	specs, shards := c.Tensors(), max(1, o.Shards)
	owner := map[string]string{}
	var all errgroup.Group
	all.SetLimit(runtime.GOMAXPROCS(0))
	for s := range shards {
		name := "model.safetensors"
		if shards > 1 {
			name = fmt.Sprintf("model-%05d-of-%05d.safetensors", s+1, shards)
		}
		part := specs[len(specs)*s/shards : len(specs)*(s+1)/shards]
		all.Go(func() error { return writeSafetensors(filepath.Join(dir, name), part, o) })
		for _, sp := range part {
			owner[sp.Name] = name
		}
	}
	if err := all.Wait(); err != nil {
		return err
	}
	if shards > 1 {
		b, err := json.Marshal(map[string]any{"metadata": map[string]any{}, "weight_map": owner})
		if err != nil {
			return err
		}
		files["model.safetensors.index.json"] = b
	}
	for name, b := range files {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
			return err
		}
	}
	return nil
}

func writeSafetensors(path string, specs []arch.Tensor, o HFOptions) (err error) {
	header, at := map[string]any{"__metadata__": map[string]string{"format": "pt"}}, 0
	dtype := map[kernels.DType]string{kernels.F32: "F32", kernels.F16: "F16", kernels.BF16: "BF16"}[o.DType]
	for _, s := range specs {
		n := o.DType.Bytes()
		for _, d := range s.Shape {
			n *= d
		}
		header[s.Name] = map[string]any{"dtype": dtype, "shape": s.Shape, "data_offsets": []int{at, at + n}}
		at += n
	}
	h, err := json.Marshal(header)
	if err != nil {
		return err
	}
	for len(h)%8 != 0 {
		h = append(h, ' ')
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := bufio.NewWriterSize(f, 1<<20) // Flush reports any error before it
	_, _ = w.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(h))))
	_, _ = w.Write(h)
	var buf []byte
	for _, s := range specs {
		buf = encode(buf[:0], Values(o.Seed, s), o.DType)
		_, _ = w.Write(buf)
	}
	return w.Flush()
}

// ConfigJSON is c as the object of a config.json.
func ConfigJSON(c arch.Config, d kernels.DType) map[string]any {
	class := ""
	for _, f := range arch.Families() {
		if f.Name == c.ModelType {
			class = f.Class
		}
	}
	j := map[string]any{
		"architectures": []string{class}, "model_type": c.ModelType, "hidden_act": "silu",
		"torch_dtype":       map[kernels.DType]string{kernels.F32: "float32", kernels.F16: "float16", kernels.BF16: "bfloat16"}[d],
		"num_hidden_layers": c.Layers, "hidden_size": c.Hidden, "intermediate_size": c.Intermediate,
		"num_attention_heads": c.Heads, "num_key_value_heads": c.KVHeads, "head_dim": c.HeadDim,
		"vocab_size": c.Vocab, "max_position_embeddings": c.MaxPositions, "rms_norm_eps": c.NormEps,
		"rope_theta": c.RopeTheta, "tie_word_embeddings": c.TiedHead, "attention_bias": c.QKVBias && c.ModelType != "qwen2",
	}
	switch c.ModelType {
	case "qwen3_moe":
		j["num_experts"], j["num_experts_per_tok"], j["moe_intermediate_size"], j["norm_topk_prob"] = c.Experts, c.ExpertsPerToken, c.ExpertWidth, c.NormExperts
	case "gemma3_text":
		delete(j, "hidden_act")
		j["hidden_activation"], j["sliding_window"], j["sliding_window_pattern"], j["rope_local_base_freq"] = "gelu_pytorch_tanh", c.Window, c.FullEvery, c.WindowTheta
		j["query_pre_attn_scalar"] = c.HeadDim
		if c.ScoreScale != 0 {
			j["query_pre_attn_scalar"] = int(math.Round(1 / (c.ScoreScale * c.ScoreScale)))
		}
		kinds := make([]string, c.Layers)
		for i := range kinds {
			kinds[i] = "sliding_attention"
			if (i+1)%c.FullEvery == 0 {
				kinds[i] = "full_attention"
			}
		}
		j["layer_types"] = kinds
	case "deepseek_v2", "deepseek_v3":
		latentJSON(j, &c)
	case "mixtral":
		j["num_local_experts"], j["num_experts_per_tok"] = c.Experts, c.ExpertsPerToken
	}
	if len(c.BOS) > 0 {
		j["bos_token_id"] = c.BOS[0]
	}
	if len(c.EOS) > 0 {
		j["eos_token_id"] = c.EOS
	}
	if r := c.Rope; r.Kind != "" {
		j["rope_scaling"] = struct {
			arch.RopeScaling
			Truncate bool `json:"truncate"`
		}{r, !r.NoTruncate}
	}
	return j
}

func latentJSON(j map[string]any, c *arch.Config) {
	delete(j, "head_dim")
	maps.Copy(j, map[string]any{
		"num_key_value_heads": c.Heads, "kv_lora_rank": c.KVRank, "q_lora_rank": json.RawMessage("null"),
		"qk_nope_head_dim": c.NopeDim, "qk_rope_head_dim": c.RopeDim, "v_head_dim": c.ValueDim,
		"first_k_dense_replace": c.DenseLayers, "moe_layer_freq": 1, "n_routed_experts": c.Experts, "n_shared_experts": c.SharedExperts,
		"num_experts_per_tok": c.ExpertsPerToken, "moe_intermediate_size": c.ExpertWidth, "norm_topk_prob": c.NormExperts,
		"routed_scaling_factor": json.RawMessage(fmt.Sprintf("%.3f", c.RoutedScale)), // transformers takes no whole number
		"n_group":               c.ExpertGroups, "topk_group": c.TopGroups, "num_nextn_predict_layers": c.DraftLayers,
		"topk_method": "noaux_tc", "scoring_func": "sigmoid",
	})
	if c.QRank > 0 {
		j["q_lora_rank"] = c.QRank
	}
	if c.Routing == arch.SoftmaxTop {
		j["scoring_func"], j["topk_method"] = "softmax", "group_limited_greedy"
		if c.ExpertGroups == 0 {
			j["n_group"], j["topk_group"], j["topk_method"] = 1, 1, "greedy"
		}
	}
}
