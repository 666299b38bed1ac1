package mock

import (
	"encoding/json"
	"io"
	"net/http"
)

const embedDims = 8

// Vector is the embedding of an input. The input is raw JSON without white space.
func Vector(input string) []float32 {
	out, draw := make([]float32, embedDims), drawsOf(input, 0)
	for i := range out {
		out[i] = float32(int8(draw()>>56)) / 128
	}
	return out
}

// embed answers with one vector per input.
func (e *Engine) embed(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	if err != nil {
		return
	}
	e.record(&Record{Leg: legPlain, Over: true}, r, body)
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
