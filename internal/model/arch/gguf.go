package arch

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
)

// RopeFreqs is the tensor of GGUF files that becomes Config.RopeFreqFactors.
const RopeFreqs = "rope_freqs.weight"

// ReadGGUF reads a GGUF file's metadata. shape returns a tensor's shape, nil if
// the file does not have it; freqFactors are the elements of RopeFreqs. Errors
// name the key.
func ReadGGUF(meta map[string]any, shape func(tensor string) []int, freqFactors []float32) (Config, error) {
	name, _ := meta["general.architecture"].(string)
	if name == "" {
		return Config{}, errors.New("general.architecture is missing")
	}
	f, err := find("general.architecture", name, func(f *Family) []string {
		if f.GGUF == "" {
			return nil
		}
		return []string{f.GGUF}
	})
	if err != nil {
		return Config{}, err
	}
	m := &metadata{keys: meta, arch: name, shape: shape}
	if n := m.count("split.count", 1); n > 1 {
		return Config{}, fmt.Errorf("split.count %d: split files are not supported, merge them with llama-gguf-split --merge", n)
	}
	c := f.readGGUF(m)
	c.ModelType, c.RopeFreqFactors = cmp.Or(c.ModelType, f.Name), freqFactors
	if id := m.count("tokenizer.ggml.bos_token_id", noID); id != noID {
		c.BOS = IDs{int32(id)}
	}
	for _, k := range []string{"eos", "eot", "eom"} {
		if id := m.count("tokenizer.ggml."+k+"_token_id", noID); id != noID {
			c.EOS = IDs(c.EOS).With(int32(id))
		}
	}
	if m.err != nil {
		return Config{}, m.err
	}
	return c, c.Validate()
}

// noID stands for a key of a token id that is absent.
const noID = math.MaxInt32

// denseGGUF reads a dense decoder.
func denseGGUF(m *metadata) (c Config) {
	a := m.arch
	c.Layers = m.count(a+".block_count", -1)
	c.Hidden = m.count(a+".embedding_length", -1)
	c.Intermediate = m.count(a+".feed_forward_length", -1)
	c.MaxPositions = m.count(a+".context_length", -1)
	c.Heads = m.count(a+".attention.head_count", -1)
	c.KVHeads = m.count(a+".attention.head_count_kv", c.Heads)
	c.HeadDim = m.count(a+".attention.key_length", c.Hidden/max(1, c.Heads))
	c.NormEps = float32(m.number(a+".attention.layer_norm_rms_epsilon", math.NaN()))
	c.RopeTheta = m.number(a+".rope.freq_base", 10000)
	m.same(a+".attention.value_length", c.HeadDim)
	m.same(a+".rope.dimension_count", c.HeadDim)
	m.experts(&c)
	if w := m.count(a+".attention.sliding_window", 0); w > 0 && w < c.MaxPositions && a != gemma3GGUF {
		m.fail(a+".attention.sliding_window", fmt.Errorf("%d below context_length %d is not supported", w, c.MaxPositions))
	}
	c.Rope = m.rope(c.MaxPositions)
	embed := denseNames[Embed].gguf
	if s := m.shape(embed); len(s) == 2 {
		c.Vocab = s[0]
	} else {
		m.fail("tensor "+embed, errors.New("missing: the file has no weights"))
	}
	c.TiedHead = m.shape(denseNames[Head].gguf) == nil
	c.QKVBias = m.shape(strings.Replace(denseNames[QBias].gguf, "{}", "0", 1)) != nil
	return c
}

// metadata reads typed keys and keeps the first error.
type metadata struct {
	keys  map[string]any
	arch  string
	shape func(tensor string) []int
	err   error
}

func (m *metadata) fail(key string, err error) {
	if m.err == nil {
		m.err = fmt.Errorf("%s: %w", key, err)
	}
}

// count reads a non-negative integer, or an array of equal ones (a value a
// layer). A negative def makes the key mandatory.
func (m *metadata) count(key string, def int) int {
	v := reflect.ValueOf(m.keys[key])
	if !v.IsValid() {
		if def < 0 {
			m.fail(key, errors.New("key is missing"))
			return 0
		}
		return def
	}
	n, ok := integer(v)
	if v.Kind() == reflect.Slice && v.Len() > 0 {
		n, ok = integer(v.Index(0))
		for i := range v.Len() {
			if other, _ := integer(v.Index(i)); other != n {
				m.fail(key, errors.New("layers that differ are not supported"))
			}
		}
	}
	if !ok || n < 0 || n > math.MaxInt32 {
		m.fail(key, fmt.Errorf("%.60s is not a count", fmt.Sprint(m.keys[key])))
		return 0
	}
	return int(n)
}

// same refuses a key that is present with another value than want.
func (m *metadata) same(key string, want int) {
	if n := m.count(key, want); n != want {
		m.fail(key, fmt.Errorf("%d is not supported here (%d is)", n, want))
	}
}

// number reads a float. A NaN def makes the key mandatory.
func (m *metadata) number(key string, def float64) float64 {
	switch v := m.keys[key].(type) {
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
func (m *metadata) rope(context int) RopeScaling {
	key := func(k string) string { return m.arch + ".rope.scaling." + k }
	kind, _ := m.keys[key("type")].(string)
	factor := m.number(key("factor"), 0)
	if _, ok := m.keys[m.arch+".rope.scale_linear"]; ok && kind == "" {
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
	s := RopeScaling{Kind: kind, Factor: factor, OriginalMaxPos: float64(m.count(key("original_context_length"), context))}
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

// integer widens any integer.
func integer(v reflect.Value) (int64, bool) {
	if v.Kind() == reflect.Interface {
		v = v.Elem()
	}
	switch {
	case v.CanInt():
		return v.Int(), true
	case v.CanUint():
		return int64(min(v.Uint(), math.MaxInt64)), true
	}
	return 0, false
}
