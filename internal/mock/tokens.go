package mock

import (
	"encoding/binary"
	"encoding/json"
	"hash/fnv"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/xpyd/xpyd/internal/openai"
)

// A mock with Config.Tokens answers token by token, like vLLM: the next token depends on those before
// it alone, text is kept back until its characters are whole, and return_token_ids is heard. What is
// kept back of a prompt is lost, as with vLLM's slower detokenizer.

// pieces are the tokens' texts, some of which end or begin within a character.
var pieces = []string{" once", " upon", " a", "é", "\n", "", "\xc3", "\xa9", " \xf0\x9f", "\x98", "\x80", "x\xe4", "\xbd\xa0", "日本"}

// Tokens with a part: those that begin a character, and the tokens that must follow.
var goesOn = map[int32]int32{6: 7, 8: 9, 9: 10, 11: 12}

const (
	endToken = int32(1)
	// firstPiece is the id of the first piece.
	firstPiece = int32(100)
	// longest is a mock's longest prompt and answer together.
	longest = 1024
	endsOne = 40 // of so many draws one ends the answer
)

// promptOf returns a prompt's ids: its own, or one for each byte.
func promptOf(prompt string) (ids []int32) {
	if json.Unmarshal([]byte(prompt), &ids) == nil {
		return ids
	}
	ids = append(ids[:0], 2)
	for _, c := range []byte(prompt) {
		ids = append(ids, 256+int32(c))
	}
	return ids
}

// nextToken is the token that follows ids.
func nextToken(ids []int32, mayEnd bool) int32 {
	if rest, ok := goesOn[ids[len(ids)-1]-firstPiece]; ok {
		return firstPiece + rest
	}
	h := fnv.New64a()
	_ = binary.Write(h, binary.LittleEndian, ids) // never fails
	draw := h.Sum64() >> 16
	if draw%endsOne == 0 && mayEnd {
		return endToken
	}
	n := int32(draw / endsOne % uint64(len(pieces)))
	for _, part := range goesOn {
		if n == part { // it needs its beginning
			n = 0
		}
	}
	return firstPiece + n
}

// writer turns tokens into text, as they come.
type writer struct{ held string }

func (w *writer) text(id int32) string {
	if id >= firstPiece && int(id-firstPiece) < len(pieces) {
		w.held += pieces[id-firstPiece]
	}
	last := w.held[max(0, len(w.held)-utf8.UTFMax):]
	for i := range len(last) {
		if utf8.RuneStart(last[i]) && !utf8.FullRuneInString(last[i:]) {
			return "" // the last character is not whole
		}
	}
	out := strings.ToValidUTF8(w.held, "\uFFFD")
	w.held = ""
	return out
}

// writeTokens answers a stream, with Burst tokens an event.
func (j *job) writeTokens() {
	j.header()
	enc := j.encoder()
	ids := promptOf(j.prompt)
	prompt, least := ids[:len(ids):len(ids)], 0
	j.get("min_tokens", &least)
	told := string(j.f["return_token_ids"]) == "true"
	if j.chat {
		chunk := enc.AppendChunk(nil, &openai.Choice{Role: true}, nil)
		if told {
			list, _ := json.Marshal(prompt) // numbers
			chunk = append(chunk[:len(chunk)-len("}\n\n")], `,"prompt_token_ids":`...)
			chunk = append(append(chunk, list...), "}\n\n"...)
		}
		if !j.write(chunk) {
			return
		}
	}
	var w writer
	most := min(j.max, longest-len(prompt))
	for n := 0; n < most; {
		var ch openai.Choice
		for range max(j.e.cfg.Burst, 1) {
			id := nextToken(ids, n >= least)
			ids = append(ids, id)
			n++
			ch.TokenIDs = append(ch.TokenIDs, id)
			ch.Text += w.text(id)
			if id == endToken {
				ch.Finish = "stop"
			} else if n == most {
				ch.Finish = "length"
			}
			if ch.Finish != "" {
				most = n
				break
			}
		}
		if most == n && w.held != "" { // the end tells what is left
			ch.Text += strings.ToValidUTF8(w.held, "\uFFFD")
		}
		if told && !j.chat && n == len(ch.TokenIDs) {
			ch.PromptTokenIDs = prompt
		}
		if n > len(ch.TokenIDs) && !j.pause(j.e.cfg.ITL) || !j.write(enc.AppendChunk(nil, &ch, nil)) {
			return
		}
	}
	if j.usage && !j.write(enc.AppendUsage(nil, openai.Usage{Prompt: len(prompt), Completion: len(ids) - len(prompt), Cached: len(prompt) - 1})) {
		return
	}
	_, _ = j.w.Write(openai.AppendDone(nil)) // the reader may have left
}

// write writes an event, and what goes wrong behind it; false if nothing may follow.
func (j *job) write(event []byte) bool {
	if _, err := j.w.Write(event); err != nil {
		return false
	}
	_ = http.NewResponseController(j.w).Flush() // the next write tells
	switch j.chunks++; j.chunks {
	case j.fault.Cut:
		j.reset()
		return false
	case j.fault.Freeze:
		<-j.ctx.Done()
		return false
	}
	return true
}
