package model

import (
	"bytes"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/internal/model/arch"
)

// stored is a tensor that a file offers, before it is known to be needed.
type stored struct {
	entry
	file string // for errors
	why  string // non-empty: it cannot be read, and why
}

// choose returns the tensors in have that c's architecture needs, by their Hugging Face
// names, after checking shapes. It refuses a model whose layers have more: it computes
// something else. If gguf, the names in have are llama.cpp's.
func choose(c *arch.Config, source string, have map[string]stored, gguf bool) (map[string]entry, error) {
	out, used := make(map[string]entry), make(map[string]bool)
	var f8, wide string // a projection that is FP8, and one that is not
	for _, t := range c.Tensors() {
		name := t.Name
		if gguf {
			name = t.GGUF
		}
		s, ok := have[name]
		if ok && gguf && t.Stacked > 0 && s.why == "" {
			s = s.expert(t)
		}
		switch {
		case !ok:
			return nil, fmt.Errorf("%s: tensor %s is missing", source, name)
		case s.why != "":
			return nil, fmt.Errorf("%s: tensor %s: %s", s.file, name, s.why)
		case !slices.Equal(s.shape, t.Shape):
			return nil, fmt.Errorf("%s: tensor %s has shape %v, the configuration needs %v", s.file, name, s.shape, t.Shape)
		case s.stored == storedF8:
			if !t.Role.Projection() {
				return nil, fmt.Errorf("%s: tensor %s: dtype %s is not supported here (for the projections of the layers it is)", s.file, name, storedF8)
			}
			key, scale, err := s.findScale(name, have)
			if err != nil {
				return nil, fmt.Errorf("%s: tensor %s: %w", s.file, name, err)
			}
			out[key], used[key] = scale, true // of the fingerprint, too
			f8 = name
		case t.Role.Projection():
			wide = name
		}
		if gguf {
			s.heads = t.PairedHeads
		}
		out[t.Name], used[name] = s.entry, true
	}
	if f8 != "" && wide != "" {
		return nil, fmt.Errorf("%s: tensor %s is %s and %s is %s: all projections of the layers or none can be", source, f8, storedF8, wide, have[wide].stored)
	}
	for _, name := range slices.Sorted(maps.Keys(have)) {
		s := have[name]
		zeroBias := strings.HasSuffix(name, ".bias") && s.why == "" && len(bytes.TrimLeft(s.raw, "\x00")) == 0
		if arch.InLayer(name) && !used[name] && !zeroBias && !harmless.MatchString(name) && !c.Drafts(name) {
			return nil, fmt.Errorf("%s: tensor %s has no place in a %s decoder of %d layers: this architecture is not supported", s.file, name, c.ModelType, c.Layers)
		}
	}
	return out, nil
}

// expert is one tensor of those that s stacks; s itself if its shape is not theirs.
func (s stored) expert(t arch.Tensor) stored {
	if !slices.Equal(s.shape, append([]int{t.Stacked}, t.Shape...)) {
		return s
	}
	size := len(s.raw) / t.Stacked
	s.raw, s.shape = s.raw[t.Place.Expert*size:][:size], s.shape[1:]
	return s
}

// harmless matches what some exporters save and nobody needs: rotary tables, masks, and
// an FP8 checkpoint's scales of activations and KV, which xpyd computes itself, row by
// row.
var harmless = regexp.MustCompile(`\.rotary_emb\.|\.attn_rot_embd\.|\.masked_bias$|\.attn\.bias$|\.(input|output|k|v|q|kv)_scale$`)
