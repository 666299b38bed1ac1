package model

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

func openGGUF(path string) (_ *Model, err error) {
	mp, err := mapFile(path)
	if err != nil {
		return nil, err
	}
	base := filepath.Base(path)
	m := &Model{Name: strings.TrimSuffix(base, filepath.Ext(base)), source: path, maps: []*mapping{mp}}
	defer func() {
		if err != nil {
			_ = m.Close()
		}
	}()
	g, err := parseGGUF(mp.data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if m.Config, err = g.config(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if m.tensors, err = m.Config.choose(path, g.canonical(path, &m.Config)); err != nil {
		return nil, err
	}
	m.names = sortedNames(m.tensors)
	m.gguf = make(map[string]any)
	for k, v := range g.meta {
		if strings.HasPrefix(k, "tokenizer.") {
			m.gguf[k] = v
		}
	}
	return m, nil
}

// ggufNames maps llama.cpp's tensor names to Hugging Face's: whole names, and
// the parts of "blk.N.PART.weight".
var (
	ggufNames = map[string]string{
		"token_embd.weight":  "model.embed_tokens.weight",
		"output_norm.weight": "model.norm.weight",
		"output.weight":      "lm_head.weight",
	}
	ggufParts = map[string]string{
		"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
		"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
		"attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
		"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
	}
)

// canonicalName translates a tensor name; what it does not know inside a
// layer keeps its own name there, and is refused by choose.
func canonicalName(name string) string {
	if n, ok := ggufNames[name]; ok {
		return n
	}
	rest, ok := strings.CutPrefix(name, "blk.")
	if !ok {
		return name
	}
	layer, rest, _ := strings.Cut(rest, ".")
	part, suffix, _ := strings.Cut(rest, ".")
	if part == "attn_rot_embd" {
		return name // a table that is derived
	}
	if p, ok := ggufParts[part]; ok {
		part = p
	}
	return "model.layers." + layer + "." + part + "." + suffix
}

// canonical lists g's tensors under Hugging Face names and shapes.
func (g *gguf) canonical(path string, c *Config) map[string]stored {
	have := make(map[string]stored, len(g.tensors))
	for name, t := range g.tensors {
		typ, known := ggmlTypeOf(t.kind)
		s := stored{file: path, entry: entry{stored: typ.name, dtype: typ.dtype, raw: t.raw}}
		if !known {
			s.why = fmt.Sprintf("type %s is not supported (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K are)", typ.name)
		} else if !typ.plain {
			s.quant = &typ.quant
		}
		for _, d := range slices.Backward(t.dims) {
			s.shape = append(s.shape, int(d))
		}
		hf := canonicalName(name)
		// llama.cpp's converter interleaves q's and k's rows for this one
		// architecture; the others are stored as they are.
		if c.ModelType == "llama" {
			switch {
			case strings.Contains(hf, ".self_attn.q_proj."):
				s.heads = c.Heads
			case strings.Contains(hf, ".self_attn.k_proj."):
				s.heads = c.KVHeads
			}
		}
		if _, twice := have[hf]; twice {
			s.why = "it is there under two names"
		}
		have[hf] = s
	}
	return have
}

// config derives the architecture from metadata and from which tensors there
// are. Errors name the key.
func (g *gguf) config() (Config, error) {
	arch, _ := g.meta["general.architecture"].(string)
	switch arch {
	case "llama", "qwen2", "qwen3":
	case "":
		return Config{}, errors.New("general.architecture is missing")
	default:
		return Config{}, fmt.Errorf("general.architecture %.60q is not supported (llama, qwen2, qwen3 are)", arch)
	}
	m := metaReader{meta: g.meta, arch: arch}
	if n := m.count("split.count", 1); n > 1 {
		return Config{}, fmt.Errorf("split.count %d: split files are not supported, merge them with llama-gguf-split --merge", n)
	}
	c := Config{ModelType: arch, QKNorm: arch == "qwen3", RopeTheta: 10000}
	c.Layers = m.count(arch+".block_count", -1)
	c.Hidden = m.count(arch+".embedding_length", -1)
	c.Intermediate = m.count(arch+".feed_forward_length", -1)
	c.MaxPositions = m.count(arch+".context_length", -1)
	c.Heads = m.count(arch+".attention.head_count", -1)
	c.KVHeads = m.count(arch+".attention.head_count_kv", c.Heads)
	c.HeadDim = m.count(arch+".attention.key_length", c.Hidden/max(1, c.Heads))
	c.NormEps = float32(m.number(arch+".attention.layer_norm_rms_epsilon", math.NaN()))
	c.RopeTheta = m.number(arch+".rope.freq_base", c.RopeTheta)
	m.same(arch+".attention.value_length", c.HeadDim)
	m.same(arch+".rope.dimension_count", c.HeadDim)
	m.same(arch+".expert_count", 0)
	if w := m.count(arch+".attention.sliding_window", 0); w > 0 && w < c.MaxPositions {
		m.fail(arch+".attention.sliding_window", fmt.Errorf("%d below context_length %d is not supported", w, c.MaxPositions))
	}
	c.Rope = m.rope(c.MaxPositions)
	if id := m.count("tokenizer.ggml.bos_token_id", math.MaxInt32); id != math.MaxInt32 {
		c.BOS = []int32{int32(id)}
	}
	for _, k := range []string{"eos", "eot", "eom"} {
		if id := m.count("tokenizer.ggml."+k+"_token_id", math.MaxInt32); id != math.MaxInt32 {
			c.EOS = union(c.EOS, []int32{int32(id)})
		}
	}
	if m.err != nil {
		return Config{}, m.err
	}
	if embed, ok := g.tensors["token_embd.weight"]; ok && len(embed.dims) == 2 {
		c.Vocab = int(min(embed.dims[1], math.MaxInt32))
	} else {
		return Config{}, errors.New("tensor token_embd.weight is missing: the file has no weights")
	}
	_, head := g.tensors["output.weight"]
	_, bias := g.tensors["blk.0.attn_q.bias"]
	c.TiedHead, c.QKVBias = !head, bias || arch == "qwen2"
	if err := g.freqFactors(&c); err != nil {
		return Config{}, err
	}
	return c, c.validate()
}

// freqFactors reads rope_freqs.weight, which Llama 3 files have.
func (g *gguf) freqFactors(c *Config) error {
	t, ok := g.tensors["rope_freqs.weight"]
	if !ok {
		return nil
	}
	typ, _ := ggmlTypeOf(t.kind)
	if !typ.plain || typ.dtype != F32 || len(t.raw) > 4*maxWidth {
		return fmt.Errorf("tensor rope_freqs.weight of type %s is not F32", typ.name)
	}
	c.RopeFreqFactors = make([]float32, len(t.raw)/4)
	r := cursor{b: t.raw}
	for i := range c.RopeFreqFactors {
		c.RopeFreqFactors[i] = math.Float32frombits(r.u32())
	}
	return nil
}

// metaReader reads typed metadata; the first error stays.
type metaReader struct {
	meta map[string]any
	arch string
	err  error
}

func (m *metaReader) fail(key string, err error) {
	if m.err == nil {
		m.err = fmt.Errorf("%s: %w", key, err)
	}
}

// count reads a non-negative integer, or an array of equal ones (a value a
// layer). A negative def makes the key mandatory.
func (m *metaReader) count(key string, def int) int {
	v, ok := m.meta[key]
	if !ok {
		if def < 0 {
			m.fail(key, errors.New("key is missing"))
			return 0
		}
		return def
	}
	n, ok := integer(v)
	if list, isList := each(v); isList && len(list) > 0 {
		n, ok = integer(list[0])
		for _, other := range list[1:] {
			if o, _ := integer(other); o != n {
				m.fail(key, errors.New("layers that differ are not supported"))
			}
		}
	}
	if !ok || n < 0 || n > math.MaxInt32 {
		m.fail(key, fmt.Errorf("%.60s is not a count", fmt.Sprint(v)))
		return 0
	}
	return int(n)
}

// same refuses a key that is present with another value than want.
func (m *metaReader) same(key string, want int) {
	if n := m.count(key, want); n != want {
		m.fail(key, fmt.Errorf("%d is not supported here (%d is)", n, want))
	}
}

// number reads a float. A NaN def makes the key mandatory.
func (m *metaReader) number(key string, def float64) float64 {
	switch v := m.meta[key].(type) {
	case nil:
		if math.IsNaN(def) {
			m.fail(key, errors.New("key is missing"))
			return 0
		}
		return def
	case float32:
		// The shortest decimal that gives this float32: 1e-05, not 9.99999…e-06.
		f, _ := strconv.ParseFloat(strconv.FormatFloat(float64(v), 'g', -1, 32), 64)
		return f
	case float64:
		return v
	default:
		m.fail(key, fmt.Errorf("%.60s is not a float", fmt.Sprint(v)))
		return 0
	}
}

// rope reads the rope.scaling keys.
func (m *metaReader) rope(context int) RopeScaling {
	key := func(k string) string { return m.arch + ".rope.scaling." + k }
	kind, _ := m.meta[key("type")].(string)
	factor := m.number(key("factor"), 0)
	if _, ok := m.meta[m.arch+".rope.scale_linear"]; ok && kind == "" {
		kind, factor = "linear", m.number(m.arch+".rope.scale_linear", 0)
	}
	switch kind {
	case "", "none":
		return RopeScaling{}
	case "linear":
		return RopeScaling{Kind: kind, Factor: factor}
	case "yarn":
	default:
		m.fail(key("type"), fmt.Errorf("%.40q is not supported (none, linear, yarn are)", kind))
		return RopeScaling{}
	}
	s := RopeScaling{Kind: kind, Factor: factor, OriginalMaxPos: m.count(key("original_context_length"), context)}
	s.BetaFast = m.number(key("yarn_beta_fast"), 0)
	s.BetaSlow = m.number(key("yarn_beta_slow"), 0)
	for _, k := range []string{"yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor"} {
		neutral := 1.0
		if k == "yarn_log_multiplier" {
			neutral = 0
		}
		if v := m.number(key(k), neutral); v != neutral {
			m.fail(key(k), fmt.Errorf("%v is not supported", v))
		}
	}
	// llama.cpp multiplies attn_factor onto yarn's own magnitude.
	if a := m.number(key("attn_factor"), 1); a != 1 {
		s.AttentionFactor = a * (0.1*math.Log(factor) + 1)
	}
	return s
}

// integer widens any integer metadata value.
func integer(v any) (int64, bool) {
	switch v := v.(type) {
	case uint8:
		return int64(v), true
	case int8:
		return int64(v), true
	case uint16:
		return int64(v), true
	case int16:
		return int64(v), true
	case uint32:
		return int64(v), true
	case int32:
		return int64(v), true
	case int64:
		return v, true
	case uint64:
		return int64(min(v, math.MaxInt64)), true
	}
	return 0, false
}

// each widens an array value to a list.
func each(v any) ([]any, bool) {
	var out []any
	switch v := v.(type) {
	case []any:
		return v, true
	case []int32:
		for _, x := range v {
			out = append(out, x)
		}
	case []uint32:
		for _, x := range v {
			out = append(out, x)
		}
	default:
		return nil, false
	}
	return out, true
}
