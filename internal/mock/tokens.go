package mock

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"net/http"
	"slices"
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

// fits refuses what is beyond a mock with Tokens, and a completion that says it may have any number.
func (j *job) fits() error {
	switch {
	case !j.e.cfg.Tokens, j.s.leg == legPrefill:
	case !j.chat && string(j.f["max_tokens"]) == "null":
		return errors.New("max_tokens is null")
	case j.f.has("max_tokens") && len(promptOf(j.prompt))+j.max > longest:
		return fmt.Errorf("max_tokens is %d, for %d tokens with those of the prompt", j.max, longest)
	}
	return nil
}

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
type writer struct {
	stops []string
	late  int    // characters that are kept back for stops
	part  string // of a character
	all   string
	sent  int // bytes of it
}

func (j *job) writer() *writer {
	w := &writer{}
	if json.Unmarshal(j.f["stop"], &w.stops) != nil {
		w.stops = make([]string, 1)
		_ = json.Unmarshal(j.f["stop"], &w.stops[0]) // else there is none
	}
	w.stops = slices.DeleteFunc(w.stops, func(s string) bool { return s == "" })
	for _, s := range w.stops {
		w.late = max(w.late, utf8.RuneCountInString(s)-1)
	}
	return w
}

// add adds a token, and returns the stop string that ends the answer, if one does.
func (w *writer) add(id int32) (stop string) {
	if id >= firstPiece && int(id-firstPiece) < len(pieces) {
		w.part += pieces[id-firstPiece]
	}
	last := w.part[max(0, len(w.part)-utf8.UTFMax):]
	for i := range len(last) {
		if utf8.RuneStart(last[i]) && !utf8.FullRuneInString(last[i:]) {
			return "" // the last character is not whole
		}
	}
	before := len(w.all)
	w.whole()
	for _, s := range w.stops {
		from := max(0, before-len(s)+1)
		if i := strings.Index(w.all[from:], s); i >= 0 {
			w.all = w.all[:from+i]
			return s
		}
	}
	return ""
}

// whole takes the rest as it is.
func (w *writer) whole() {
	w.all += strings.ToValidUTF8(w.part, "\uFFFD")
	w.part = ""
}

// take returns what may be sent.
func (w *writer) take(end bool) string {
	to := len(w.all)
	for n := 0; n < w.late && !end && to > w.sent; n++ {
		_, size := utf8.DecodeLastRuneInString(w.all[:to])
		to -= size
	}
	text := w.all[w.sent:to]
	w.sent = to
	return text
}

// writeTokens answers a stream, with one to Burst tokens an event.
func (j *job) writeTokens() {
	j.header()
	enc := j.encoder()
	ids := promptOf(j.prompt)
	if j.fault.Amiss {
		ids = slices.Insert(ids, 0, 2)
	}
	prompt, least := ids[:len(ids):len(ids)], 0
	j.get("min_tokens", &least)
	told := string(j.f["return_token_ids"]) == "true" && !j.fault.NoIDs
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
	w := j.writer()
	most := min(j.max, longest-len(prompt))
	for n := 0; n < most; {
		var ch openai.Choice
		for range 1 + n%max(j.e.cfg.Burst, 1) {
			id := nextToken(ids, n >= least)
			ids = append(ids, id)
			n++
			ch.TokenIDs = append(ch.TokenIDs, id)
			if ch.StopString = w.add(id); ch.StopString != "" || id == endToken {
				ch.Finish = "stop"
			} else if n == most {
				ch.Finish = "length"
			}
			if ch.Finish != "" {
				most = n
				break
			}
		}
		if ch.Finish == "length" {
			w.whole()
		}
		ch.Text = w.take(ch.Finish != "")
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
	case j.fault.Fail: // as vLLM does whose core has died
		_, _ = io.WriteString(j.w, `data: {"error":{"message":"EngineCore encountered an issue","type":"InternalServerError","param":null,"code":500}}`+"\n\ndata: [DONE]\n\n") // the reader may have left
		return false
	}
	return true
}
