package tokenizer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// maxID bounds token ids, so that a broken file cannot ask for huge tables.
const maxID = 1 << 22

type fileJSON struct {
	Added         []addedJSON     `json:"added_tokens"`
	Normalizer    json.RawMessage `json:"normalizer"`
	PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
	PostProcessor json.RawMessage `json:"post_processor"`
	Decoder       json.RawMessage `json:"decoder"`
	Model         modelJSON       `json:"model"`
}

type addedJSON struct {
	ID         int64  `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

type modelJSON struct {
	Type         string           `json:"type"`
	Dropout      float64          `json:"dropout"`
	Unk          *string          `json:"unk_token"`
	Prefix       string           `json:"continuing_subword_prefix"`
	Suffix       string           `json:"end_of_word_suffix"`
	FuseUnk      bool             `json:"fuse_unk"`
	ByteFallback bool             `json:"byte_fallback"`
	IgnoreMerges bool             `json:"ignore_merges"`
	Vocab        map[string]int32 `json:"vocab"`
	Merges       json.RawMessage  `json:"merges"`
}

// FromJSON builds a Tokenizer from the contents of tokenizer.json and, if not
// empty, tokenizer_config.json.
func FromJSON(tokenizerJSON, tokenizerConfigJSON []byte) (*Tokenizer, error) {
	var f fileJSON
	if err := json.Unmarshal(tokenizerJSON, &f); err != nil {
		return nil, fmt.Errorf("read tokenizer.json: %w", err)
	}
	t, err := f.build(tokenizerConfigJSON)
	if err != nil {
		return nil, fmt.Errorf("read tokenizer.json: %w", err)
	}
	return t, nil
}

func (f *fileJSON) build(config []byte) (*Tokenizer, error) {
	m := &f.Model
	switch {
	case m.Type != "BPE" && (m.Type != "" || len(m.Merges) == 0):
		return nil, fmt.Errorf("model type %q is not supported, only BPE", m.Type)
	case m.Dropout != 0:
		return nil, errors.New("BPE dropout is not supported")
	case m.Prefix != "" || m.Suffix != "":
		return nil, errors.New("continuing_subword_prefix and end_of_word_suffix are not supported")
	case len(m.Vocab) == 0:
		return nil, errors.New("empty vocabulary")
	}
	t := &Tokenizer{}
	var err error
	if t.norm, err = readNormalizer(f.Normalizer); err != nil {
		return nil, fmt.Errorf("normalizer: %w", err)
	}
	pre, byteLevel, err := readPreTokenizer(f.PreTokenizer)
	if err != nil {
		return nil, fmt.Errorf("pre_tokenizer: %w", err)
	}
	t.pre = pre
	dec, err := readDecoder(f.Decoder)
	if err != nil {
		return nil, fmt.Errorf("decoder: %w", err)
	}
	t.dec = dec.decoding
	if err := t.setVocab(m.Vocab, f.Added, dec); err != nil {
		return nil, err
	}
	if err := t.setModel(m, byteLevel); err != nil {
		return nil, err
	}
	id := func(s string) (int32, bool) {
		for _, a := range f.Added {
			if a.Content == s {
				return int32(a.ID), true
			}
		}
		v, ok := m.Vocab[s]
		return v, ok
	}
	if t.prefix, t.suffix, err = readPostProcessor(f.PostProcessor, int32(len(t.pieces))); err != nil {
		return nil, fmt.Errorf("post_processor: %w", err)
	}
	if len(t.prefix) == 1 {
		t.bos, t.hasBOS = t.prefix[0], true
	}
	if err := t.configure(config, id); err != nil {
		return nil, err
	}
	for _, raw := range []json.RawMessage{f.Normalizer, f.PreTokenizer, f.Decoder} {
		t.description = append(t.description, compact(raw))
	}
	t.finish()
	return t, nil
}

// setVocab fills the tables by id and the matchers of added tokens.
func (t *Tokenizer) setVocab(vocab map[string]int32, added []addedJSON, dec decoder) error {
	size := int32(0)
	grow := func(id int64, piece string) error {
		if id < 0 || id >= maxID {
			return fmt.Errorf("id %d of token %q is out of range", id, piece)
		}
		size = max(size, int32(id)+1)
		return nil
	}
	for piece, id := range vocab {
		if err := grow(int64(id), piece); err != nil {
			return err
		}
	}
	for i := range added {
		if id, ok := vocab[added[i].Content]; ok {
			added[i].ID = int64(id) // as in Hugging Face, the vocabulary is right
		}
		if err := grow(added[i].ID, added[i].Content); err != nil {
			return err
		}
	}
	t.pieces, t.texts, t.flags = make([]string, size), make([]string, size), make([]tokenFlag, size)
	for piece, id := range vocab {
		if t.flags[id] != 0 {
			return fmt.Errorf("tokens %q and %q have the same id %d", min(piece, t.pieces[id]), max(piece, t.pieces[id]), id)
		}
		t.setToken(id, piece, dec)
	}
	var tokens []addedToken
	for _, a := range added {
		if a.Content == "" {
			continue
		}
		id := int32(a.ID)
		t.setToken(id, a.Content, dec)
		if a.Special {
			t.flags[id] |= flagSpecial
		}
		tokens = append(tokens, addedToken{id: id, content: a.Content, special: a.Special, normalized: a.Normalized,
			lstrip: a.LStrip, rstrip: a.RStrip, singleWord: a.SingleWord})
	}
	t.setAdded(tokens)
	return nil
}

// setToken fills the tables for one id.
func (t *Tokenizer) setToken(id int32, piece string, dec decoder) {
	t.pieces[id] = piece
	text, isByte := dec.text(piece)
	t.texts[id] = text
	t.flags[id] = flagPresent
	if isByte {
		t.flags[id] |= flagByte
	}
	if utf8.ValidString(text) {
		t.flags[id] |= flagUTF8
	}
}

// setAdded builds the two matchers.
func (t *Tokenizer) setAdded(tokens []addedToken) {
	var raw, after []addedToken
	for _, a := range tokens {
		if !a.normalized {
			raw = append(raw, a)
			continue
		}
		if a.content = t.normalize(a.content); a.content != "" {
			after = append(after, a)
		}
	}
	t.raw, t.after = newMatcher(raw), newMatcher(after)
	t.description = append(t.description, fmt.Sprintf("%+v", tokens))
}

// setModel builds the BPE model; byteLevel says that words are bytes.
func (t *Tokenizer) setModel(m *modelJSON, byteLevel bool) error {
	b := newBPE(len(t.pieces))
	b.byteLevel, b.ignoreMerges, b.fuseUnk = byteLevel, m.IgnoreMerges, m.FuseUnk
	if !byteLevel {
		b.words = m.Vocab
	} else {
		for piece, id := range m.Vocab {
			if text, ok := fromByteLevel(piece); ok {
				b.words[text] = id
			}
		}
	}
	if m.Unk != nil {
		if id, ok := m.Vocab[*m.Unk]; ok {
			b.unk = id
		}
	}
	b.firstSymbols(m.ByteFallback && !byteLevel)
	merges, err := readMerges(m.Merges)
	if err != nil {
		return err
	}
	if err := b.setMerges(merges, m.Vocab, true); err != nil {
		return err
	}
	t.model = b
	t.description = append(t.description, fmt.Sprint("bpe ", byteLevel, b.ignoreMerges, b.fuseUnk, b.unk, b.fallback))
	return nil
}

// readMerges reads merges in either form: "a b", or ["a", "b"].
func readMerges(raw json.RawMessage) ([][2]string, error) {
	inner, isList := bytes.CutPrefix(bytes.TrimSpace(raw), []byte("["))
	if !isList || !bytes.HasPrefix(bytes.TrimSpace(inner), []byte("[")) {
		var lines []string
		if err := json.Unmarshal(raw, &lines); err != nil {
			return nil, fmt.Errorf("merges: %w", err)
		}
		return splitMerges(lines)
	}
	var pairs [][2]string
	if err := json.Unmarshal(raw, &pairs); err != nil {
		return nil, fmt.Errorf("merges: %w", err)
	}
	for i, p := range pairs {
		if p[0] == "" || p[1] == "" {
			return nil, fmt.Errorf("merge %d: want two parts, have %q", i, p)
		}
	}
	return pairs, nil
}

func splitMerges(lines []string) ([][2]string, error) {
	out := make([][2]string, 0, len(lines))
	for i, line := range lines {
		if strings.HasPrefix(line, "#version") {
			continue
		}
		left, right, ok := strings.Cut(line, " ")
		if !ok || left == "" || right == "" || strings.Contains(right, " ") {
			return nil, fmt.Errorf("merge %d: want two parts in %q", i, line)
		}
		out = append(out, [2]string{left, right})
	}
	return out, nil
}
