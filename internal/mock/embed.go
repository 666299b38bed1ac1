package mock

import (
	"encoding/json"
	"hash/fnv"
	"io"
	"net/http"
)

// embedDims is the length of a mock's vectors.
const embedDims = 8

// Vector is the embedding of an input, given as raw JSON without white space.
func Vector(input string) []float32 {
	h := fnv.New64a()
	_, _ = io.WriteString(h, input) // never fails
	x := h.Sum64()
	out := make([]float32, embedDims)
	for i := range out {
		x = x*6364136223846793005 + 1442695040888963407
		out[i] = float32(int8(x>>56)) / 128
	}
	return out
}

// embed answers one vector an input.
func (e *Engine) embed(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	if err != nil {
		return
	}
	rec := &Record{Leg: legPlain, Path: r.URL.Path, Header: r.Header, Body: string(body), Probe: r.Header.Get("x-xpyd-probe") != "", Over: true}
	e.mu.Lock()
	if e.records = append(e.records, rec); len(e.records) > maxRecords {
		e.records = e.records[len(e.records)-maxRecords:]
	}
	e.mu.Unlock()
	var ask struct {
		Model string
		Input json.RawMessage
	}
	if err := json.Unmarshal(body, &ask); err != nil || ask.Model != e.cfg.Model || len(ask.Input) == 0 {
		fail(w, 400, "mock: want the model %q and an input, got %s", e.cfg.Model, body)
		return
	}
	inputs := []json.RawMessage{ask.Input}
	if list := []json.RawMessage(nil); json.Unmarshal(ask.Input, &list) == nil && len(list) > 0 && list[0][0] != '-' && (list[0][0] < '0' || list[0][0] > '9') {
		inputs = list
	}
	type vector struct {
		Object    string    `json:"object"`
		Index     int       `json:"index"`
		Embedding []float32 `json:"embedding"`
	}
	data := make([]vector, len(inputs))
	for i, in := range inputs {
		data[i] = vector{"embedding", i, Vector(compact(in))}
	}
	writeJSON(w, map[string]any{"object": "list", "model": ask.Model, "data": data,
		"usage": map[string]int{"prompt_tokens": promptTokens * len(data), "total_tokens": promptTokens * len(data)}})
}
