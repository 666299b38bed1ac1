// Package tokenizer turns text into token ids and back, from a Hugging Face
// tokenizer.json or a GGUF vocabulary, and renders a model's chat template.
//
// Start with Load, FromJSON or FromGGUF. A Tokenizer is immutable and safe for
// concurrent use; a Detokenizer or a Stopper belongs to one output stream.
//
// Covered are byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and BPE with byte
// fallback (Llama 2, Mistral, the sentencepiece vocabularies of GGUF).
// Non-goals: Unigram and WordPiece models, training, offsets, padding and
// truncation (a tokenizer.json that asks for the last two is read without them).
package tokenizer

import (
	"slices"
	"strings"
	"unicode/utf8"
)

type tokenFlag uint8

const (
	flagPresent tokenFlag = 1 << iota // the id has a token
	flagSpecial                       // dropped by Decode(…, skipSpecial)
	flagByte                          // one byte of a byte-fallback run
	flagUTF8                          // the token's bytes are whole characters
)

// Tokenizer is one vocabulary with everything that surrounds it: normaliser,
// pre-splitter, added tokens, begin and end tokens, decoder, chat template.
type Tokenizer struct {
	pieces []string // by id: the vocabulary's own spelling
	texts  []string // by id: the bytes that the token stands for
	flags  []tokenFlag

	norm  []normStep
	raw   *matcher // added tokens, matched before normalising
	after *matcher // added tokens, matched after normalising
	pre   []splitStep
	model *bpe

	prefix, suffix []int32 // around the ids of a text, with addSpecial
	dec            decoding

	bos         int32
	hasBOS      bool
	eos         []int32
	chat        chat
	description []string // canonical text of the options, for the fingerprint
	fingerprint string
}

// VocabSize returns one more than the largest token id.
func (t *Tokenizer) VocabSize() int { return len(t.pieces) }

// BOS returns the id that begins a text, if the model has one. Encode adds it
// only where the tokenizer's own post-processor says so.
func (t *Tokenizer) BOS() (int32, bool) { return t.bos, t.hasBOS }

// EOS returns the ids that end a text, most usual first.
func (t *Tokenizer) EOS() []int32 { return slices.Clone(t.eos) }

// TokenBytes returns the raw bytes that id stands for, which need not be whole
// UTF-8 characters; nil for an unknown id.
func (t *Tokenizer) TokenBytes(id int32) []byte {
	if !t.has(id, flagPresent) {
		return nil
	}
	return []byte(t.texts[id])
}

// TokenText returns the text of id alone, with U+FFFD for a part of a
// character. A leading space is kept, so texts of a sequence concatenate.
func (t *Tokenizer) TokenText(id int32) string {
	switch {
	case !t.has(id, flagPresent):
		return ""
	case t.flags[id]&flagUTF8 != 0:
		return t.texts[id]
	}
	return string(appendLossy(nil, []byte(t.texts[id]), t.dec.perByte))
}

// Piece returns the vocabulary's own spelling of id, such as "Ġthe" or
// "<0x0A>"; "" for an unknown id.
func (t *Tokenizer) Piece(id int32) string {
	if !t.has(id, flagPresent) {
		return ""
	}
	return t.pieces[id]
}

// IsSpecial reports whether id is a control token, which Decode can skip.
func (t *Tokenizer) IsSpecial(id int32) bool { return t.has(id, flagSpecial) }

// Fingerprint is a SHA-256 in hex over all that decides what Encode, Decode and
// RenderChat return. Two tokenizers with equal fingerprints are interchangeable.
func (t *Tokenizer) Fingerprint() string { return t.fingerprint }

func (t *Tokenizer) has(id int32, f tokenFlag) bool {
	return id >= 0 && int(id) < len(t.flags) && t.flags[id]&f != 0
}

// Encode returns the ids of text. Added tokens that occur in text, special ones too, become
// their ids, as in Hugging Face tokenizers. addSpecial adds the model's begin and end
// tokens. Invalid UTF-8 is read as U+FFFD.
func (t *Tokenizer) Encode(text string, addSpecial bool) []int32 {
	if !utf8.ValidString(text) {
		text = string(appendLossy(nil, []byte(text), false))
	}
	e := encoder{t: t, out: make([]int32, 0, len(t.prefix)+len(text)/4+len(t.suffix)+1)}
	if addSpecial {
		e.out = append(e.out, t.prefix...)
	}
	start := true
	t.raw.each(text, func(part string, id int32) {
		if id >= 0 {
			e.out = append(e.out, id)
		} else {
			t.after.each(t.normalize(part), func(part string, id int32) {
				if id >= 0 {
					e.out = append(e.out, id)
				} else {
					e.split(part, t.pre, start)
				}
				start = false
			})
		}
		start = false
	})
	if addSpecial {
		e.out = append(e.out, t.suffix...)
	}
	return e.out
}

// Decode returns the text of ids: what a Detokenizer yields when each id is pushed. Unknown
// ids are dropped; invalid UTF-8 becomes U+FFFD.
func (t *Tokenizer) Decode(ids []int32, skipSpecial bool) string {
	d := t.NewDetokenizer(skipSpecial, nil)
	var b strings.Builder
	for _, id := range ids {
		b.WriteString(d.Push(id))
	}
	b.WriteString(d.Flush())
	return b.String()
}
