package tokenizer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/text/unicode/norm"
)

// partJSON is any normalizer, pre_tokenizer, post_processor or decoder, with
// the fields of all the kinds that are understood.
type partJSON struct {
	Type          string                   `json:"type"`
	Normalizers   []json.RawMessage        `json:"normalizers"`
	PreTokenizers []json.RawMessage        `json:"pretokenizers"`
	Processors    []json.RawMessage        `json:"processors"`
	Decoders      []json.RawMessage        `json:"decoders"`
	Pattern       patternJSON              `json:"pattern"`
	Content       string                   `json:"content"`
	Prepend       string                   `json:"prepend"`
	Behavior      string                   `json:"behavior"`
	Invert        bool                     `json:"invert"`
	Individual    bool                     `json:"individual_digits"`
	AddPrefix     *bool                    `json:"add_prefix_space"`
	PrependScheme string                   `json:"prepend_scheme"`
	Replacement   string                   `json:"replacement"`
	Split         *bool                    `json:"split"`
	UseRegex      *bool                    `json:"use_regex"`
	Start         int                      `json:"start"`
	Stop          int                      `json:"stop"`
	Single        []map[string]templateRef `json:"single"`
	Special       map[string]struct {
		IDs []int32 `json:"ids"`
	} `json:"special_tokens"`
}

type patternJSON struct {
	String *string
	Regex  *string
}

type templateRef struct {
	ID string `json:"id"`
}

// maxDepth bounds how deep Sequence parts nest.
const maxDepth = 8

// flatten reads a part and, if it is a Sequence, its members in order.
func flatten(raw json.RawMessage, depth int) ([]partJSON, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	if depth > maxDepth {
		return nil, errors.New("nested too deep")
	}
	var p partJSON
	if err := json.Unmarshal(raw, &p); err != nil {
		return nil, err
	}
	if p.Type != "Sequence" {
		return []partJSON{p}, nil
	}
	var out []partJSON
	for _, list := range [][]json.RawMessage{p.Normalizers, p.PreTokenizers, p.Processors, p.Decoders} {
		for _, r := range list {
			parts, err := flatten(r, depth+1)
			if err != nil {
				return nil, err
			}
			out = append(out, parts...)
		}
	}
	return out, nil
}

func readNormalizer(raw json.RawMessage) ([]normStep, error) {
	parts, err := flatten(raw, 0)
	if err != nil {
		return nil, err
	}
	forms := map[string]norm.Form{"NFC": norm.NFC, "NFD": norm.NFD, "NFKC": norm.NFKC, "NFKD": norm.NFKD}
	var steps []normStep
	for _, p := range parts {
		form, ok := forms[p.Type]
		switch {
		case ok:
			steps = append(steps, normStep{form: &form})
		case p.Type == "Prepend" && p.Prepend != "":
			steps = append(steps, normStep{prepend: p.Prepend})
		case p.Type == "Replace" && p.Pattern.String != nil && *p.Pattern.String != "":
			steps = append(steps, normStep{old: *p.Pattern.String, content: p.Content})
		case p.Type == "Replace" && p.Pattern.Regex != nil:
			re, tail, err := compilePattern(*p.Pattern.Regex)
			if err != nil {
				return nil, err
			}
			if tail != 0 {
				return nil, fmt.Errorf("pattern %q: look-ahead is not supported here", *p.Pattern.Regex)
			}
			steps = append(steps, normStep{pattern: re, content: p.Content})
		default:
			return nil, fmt.Errorf("%s is not supported", p.Type)
		}
	}
	return steps, nil
}

// readPreTokenizer also reports whether a ByteLevel step turns words into bytes.
func readPreTokenizer(raw json.RawMessage) (steps []splitStep, byteLevel bool, err error) {
	parts, err := flatten(raw, 0)
	if err != nil {
		return nil, false, err
	}
	for _, p := range parts {
		if byteLevel {
			return nil, false, fmt.Errorf("%s after ByteLevel is not supported", p.Type)
		}
		var st splitStep
		switch p.Type {
		case "ByteLevel":
			byteLevel = true
			if p.AddPrefix == nil || *p.AddPrefix {
				st.mark, st.prefix = " ", prefixAlways
			}
			if p.UseRegex == nil || *p.UseRegex {
				st.cut = cutGPT2
			}
		case "Digits":
			st.cut = cutDigits
			if !p.Individual {
				st.mode = contiguous
			}
		case "Metaspace":
			st, err = readMetaspace(p)
		case "Split":
			st, err = readSplit(p)
		default:
			err = fmt.Errorf("%s is not supported", p.Type)
		}
		if err != nil {
			return nil, false, err
		}
		if st.mark != "" || st.cut != nil {
			steps = append(steps, st)
		}
	}
	return steps, byteLevel, nil
}

func readMetaspace(p partJSON) (splitStep, error) {
	if p.Replacement != spaceMark {
		return splitStep{}, fmt.Errorf("Metaspace with %q is not supported", p.Replacement)
	}
	st := splitStep{mark: spaceMark, prefix: prefixAlways, mode: mergedWithNext}
	switch {
	case p.PrependScheme == "first":
		st.prefix = prefixFirst
	case p.PrependScheme == "never", p.PrependScheme == "" && p.AddPrefix != nil && !*p.AddPrefix:
		st.prefix = prefixNever
	case p.PrependScheme != "" && p.PrependScheme != "always":
		return st, fmt.Errorf("Metaspace prepend_scheme %q is not supported", p.PrependScheme)
	}
	if p.Split == nil || *p.Split {
		st.cut = stringCutter(spaceMark)
	}
	return st, nil
}

func readSplit(p partJSON) (splitStep, error) {
	modes := map[string]behavior{"Isolated": isolated, "Removed": removed, "Contiguous": contiguous,
		"MergedWithPrevious": mergedWithPrevious, "MergedWithNext": mergedWithNext}
	mode, ok := modes[p.Behavior]
	if !ok {
		return splitStep{}, fmt.Errorf("Split behavior %q is not supported", p.Behavior)
	}
	st := splitStep{mode: mode, invert: p.Invert}
	switch {
	case p.Pattern.Regex != nil:
		var err error
		st.cut, err = patternCutter(*p.Pattern.Regex)
		return st, err
	case p.Pattern.String != nil && *p.Pattern.String != "":
		st.cut = stringCutter(*p.Pattern.String)
		return st, nil
	}
	return st, errors.New("Split without a pattern")
}

// stringCutter cuts at occurrences of sep.
func stringCutter(sep string) cutter {
	return func(s string) (int, bool) {
		switch i := strings.Index(s, sep); {
		case i == 0:
			return len(sep), true
		case i > 0:
			return i, false
		}
		return len(s), false
	}
}

// readPostProcessor returns the ids that stand around the ids of a text.
func readPostProcessor(raw json.RawMessage, size int32) (prefix, suffix []int32, err error) {
	parts, err := flatten(raw, 0)
	if err != nil {
		return nil, nil, err
	}
	for _, p := range parts {
		switch p.Type {
		case "ByteLevel": // concerns offsets only
			continue
		case "TemplateProcessing":
		default:
			return nil, nil, fmt.Errorf("%s is not supported", p.Type)
		}
		var before, after []int32
		to, texts := &before, 0
		for _, item := range p.Single {
			if ref, ok := item["SpecialToken"]; ok {
				for _, id := range p.Special[ref.ID].IDs {
					if id < 0 || id >= size {
						return nil, nil, fmt.Errorf("id %d of %q is out of range", id, ref.ID)
					}
					*to = append(*to, id)
				}
				continue
			}
			if _, ok := item["Sequence"]; !ok {
				return nil, nil, errors.New("template item is neither SpecialToken nor Sequence")
			}
			to = &after
			texts++
		}
		if texts != 1 {
			return nil, nil, fmt.Errorf("template has %d texts, want 1", texts)
		}
		prefix, suffix = append(before, prefix...), append(suffix, after...)
	}
	return prefix, suffix, nil
}

// compact returns raw without insignificant white space.
func compact(raw json.RawMessage) string {
	var b bytes.Buffer
	if json.Compact(&b, raw) != nil {
		return ""
	}
	return b.String()
}
