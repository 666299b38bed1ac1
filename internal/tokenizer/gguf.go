package tokenizer

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// Token types of a GGUF vocabulary.
const (
	ggufNormal = iota + 1
	ggufUnknown
	ggufControl
	ggufUserDefined
	ggufUnused
	ggufByte
)

// FromGGUF builds a Tokenizer from the metadata of a GGUF file: the keys
// tokenizer.ggml.* with values as a GGUF reader makes them (string, bool,
// uint32, []string, []int32, []float32, …), and tokenizer.chat_template. The
// models gpt2 (byte-level BPE) and llama (sentencepiece BPE with scores) are
// understood.
func FromGGUF(meta map[string]any) (*Tokenizer, error) {
	t, err := (&gguf{meta: meta}).build()
	if err != nil {
		return nil, fmt.Errorf("read GGUF vocabulary: %w", err)
	}
	return t, nil
}

type gguf struct {
	meta   map[string]any
	tokens []string
	types  []int32
	addBOS bool // default where the file does not say
}

const ggml = "tokenizer.ggml."

func (g *gguf) build() (*Tokenizer, error) {
	g.tokens, _ = g.meta[ggml+"tokens"].([]string)
	if len(g.tokens) == 0 || len(g.tokens) > maxID {
		return nil, fmt.Errorf("%stokens has %d entries", ggml, len(g.tokens))
	}
	g.types = slices.Repeat([]int32{ggufNormal}, len(g.tokens))
	if types := g.meta[ggml+"token_type"]; types != nil {
		var ok bool
		if g.types, ok = types.([]int32); !ok || len(g.types) != len(g.tokens) {
			return nil, fmt.Errorf("%stoken_type: want %d int32, have %T of other length or type", ggml, len(g.tokens), types)
		}
	}
	t := &Tokenizer{}
	var err error
	kind, _ := g.meta[ggml+"model"].(string)
	switch kind {
	case "gpt2":
		err = g.byteLevel(t)
	case "llama":
		err = g.sentencePiece(t)
	default:
		err = fmt.Errorf("%smodel %q is not supported, only gpt2 and llama", ggml, kind)
	}
	if err != nil {
		return nil, err
	}
	g.specials(t)
	t.finish()
	return t, nil
}

func (g *gguf) byteLevel(t *Tokenizer) error {
	pre, _ := g.meta[ggml+"pre"].(string)
	family, err := ggufPre(pre)
	if err != nil {
		return err
	}
	for _, p := range family.patterns {
		cut, err := patternCutter(p)
		if err != nil {
			return err
		}
		t.pre = append(t.pre, splitStep{cut: cut})
	}
	if family.nfc {
		form := norm.NFC
		t.norm = []normStep{{form: &form}}
	}
	merges, ok := g.meta[ggml+"merges"].([]string)
	if !ok {
		return errors.New(ggml + "merges is missing")
	}
	pairs, err := splitMerges(merges)
	if err != nil {
		return err
	}
	vocab := make(map[string]int32, len(g.tokens))
	b := newBPE(len(g.tokens))
	b.byteLevel, b.ignoreMerges = true, family.ignoreMerges
	for id, piece := range g.tokens {
		if _, dup := vocab[piece]; dup {
			continue // as in llama.cpp, the first stands
		}
		vocab[piece] = int32(id)
		if text, ok := fromByteLevel(piece); ok && g.types[id] == ggufNormal {
			b.words[text] = int32(id)
		}
	}
	b.firstSymbols(false)
	if err := b.setMerges(pairs, vocab, false); err != nil {
		return err
	}
	t.model = b
	g.addBOS = family.bos
	g.setTokens(t, decoder{byteLevel: true})
	t.description = append(t.description, "gguf gpt2 "+pre)
	return nil
}

// maxPiece bounds a sentencepiece token, in bytes, since every way to cut it is tried. The
// longest in real vocabularies have a hundred.
const maxPiece = 4096

func (g *gguf) sentencePiece(t *Tokenizer) error {
	scores, ok := g.meta[ggml+"scores"].([]float32)
	if !ok || len(scores) != len(g.tokens) {
		return fmt.Errorf("%sscores: want %d float32", ggml, len(g.tokens))
	}
	b := newBPE(len(g.tokens))
	var usable []int32
	for id, piece := range g.tokens {
		if len(piece) > maxPiece {
			return fmt.Errorf("%stokens: token %d has %d bytes, at most %d", ggml, id, len(piece), maxPiece)
		}
		if _, dup := b.words[piece]; dup || piece == "" || !utf8.ValidString(piece) || math.IsNaN(float64(scores[id])) {
			continue
		}
		b.words[piece] = int32(id)
		switch g.types[id] {
		case ggufUnknown:
			b.unk = int32(id)
		case ggufControl, ggufByte:
		default:
			usable = append(usable, int32(id))
		}
	}
	b.firstSymbols(true)
	b.fuseUnk = true
	slices.SortStableFunc(usable, func(x, y int32) int { return cmp.Compare(scores[y], scores[x]) })
	// A pair merges if its text is a token, best score first; so every way to cut a token
	// in two symbols is a merge with the rank of its score. Characters that are not tokens
	// themselves are hidden symbols.
	symbol := func(s string) (int32, bool) {
		if id, ok := b.words[s]; ok {
			return id, true
		}
		if _, n := utf8.DecodeRuneInString(s); n < len(s) {
			return 0, false
		}
		id := b.vocabSize + int32(len(b.hidden))
		b.hidden = append(b.hidden, s)
		b.words[s] = id
		if len(s) == 1 {
			b.ascii[s[0]] = id
		}
		return id, true
	}
	type merge struct {
		left, right, id int32
		rank            uint32
	}
	var merges []merge
	rank := uint32(0)
	for i, id := range usable {
		if i > 0 && scores[id] != scores[usable[i-1]] {
			rank++
		}
		piece := g.tokens[id]
		for at := range piece {
			if at == 0 {
				continue
			}
			left, ok1 := symbol(piece[:at])
			right, ok2 := symbol(piece[at:])
			if ok1 && ok2 {
				merges = append(merges, merge{left, right, id, rank})
			}
		}
	}
	b.merges = newPairTable(len(merges))
	for _, m := range merges {
		b.merges.put(m.left, m.right, m.id, m.rank)
	}
	t.model = b

	dec := decoder{fallback: true, replace: [][2]string{{spaceMark, " "}}}
	dec.perByte = true
	if v, ok := g.meta[ggml+"add_space_prefix"].(bool); !ok || v {
		t.norm = []normStep{{prepend: spaceMark}}
		dec.strip = 1
	}
	t.norm = append(t.norm, normStep{old: " ", content: spaceMark})
	t.dec = dec.decoding
	g.addBOS = true
	g.setTokens(t, dec)
	t.description = append(t.description, fmt.Sprint("gguf llama ", len(t.norm)))
	return nil
}

// setTokens fills the tables by id. Added tokens are those that are not normal.
func (g *gguf) setTokens(t *Tokenizer, dec decoder) {
	n := len(g.tokens)
	t.pieces, t.texts, t.flags = make([]string, n), make([]string, n), make([]tokenFlag, n)
	var added []addedToken
	for id, piece := range g.tokens {
		if !utf8.ValidString(piece) {
			piece = strings.ToValidUTF8(piece, "\uFFFD")
		}
		t.setToken(int32(id), piece, dec)
		kind := g.types[id]
		special := kind == ggufControl || kind == ggufUnknown
		if special {
			t.flags[id] |= flagSpecial
		}
		if piece != "" && (special || kind == ggufUserDefined) {
			added = append(added, addedToken{id: int32(id), content: piece, special: special})
		}
	}
	t.setAdded(added)
}

// specials sets begin and end tokens and the chat template.
func (g *gguf) specials(t *Tokenizer) {
	named := map[string]string{}
	id := func(key, name string) (int32, bool) {
		n, ok := toInt(g.meta[ggml+key])
		if !ok || n < 0 || n >= int64(len(g.tokens)) {
			return 0, false
		}
		if name != "" {
			named[name] = t.pieces[n]
		}
		return int32(n), true
	}
	t.bos, t.hasBOS = id("bos_token_id", "bos_token")
	for _, end := range [][2]string{{"eos_token_id", "eos_token"}, {"eot_token_id"}, {"eom_token_id"}} {
		if n, ok := id(end[0], end[1]); ok && !slices.Contains(t.eos, n) {
			t.eos = append(t.eos, n)
		}
	}
	id("unknown_token_id", "unk_token")
	id("padding_token_id", "pad_token")
	addBOS, ok := g.meta[ggml+"add_bos_token"].(bool)
	if !ok {
		addBOS = g.addBOS
	}
	if addBOS && t.hasBOS {
		t.prefix = []int32{t.bos}
	}
	if addEOS, _ := g.meta[ggml+"add_eos_token"].(bool); addEOS && len(t.eos) > 0 {
		t.suffix = t.eos[:1:1]
	}
	sources := map[string]string{}
	for key, v := range g.meta {
		src, ok := v.(string)
		switch name, named := strings.CutPrefix(key, "tokenizer.chat_template"); {
		case !named || !ok:
		case name == "":
			sources[defaultTemplate] = src
		case name[0] == '.':
			sources[name[1:]] = src
		}
	}
	t.chat = newChat(sources, named)
}

// toInt widens an integer of any width.
func toInt(v any) (int64, bool) {
	switch n := reflect.ValueOf(v); {
	case n.CanInt():
		return n.Int(), true
	case n.CanUint():
		return int64(n.Uint()), true
	}
	return 0, false
}
