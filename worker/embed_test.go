package worker_test

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/worker"
)

// embedded is the answer to embeddings.
type embedded struct {
	Object, Model string
	Data          []struct {
		Object    string
		Index     int
		Embedding json.RawMessage
	}
	Usage struct {
		Prompt int `json:"prompt_tokens"`
		Total  int `json:"total_tokens"`
	}
	Error *struct{ Message, Type, Param, Code string }
}

// width is of the embedded model's vectors.
const width = 64

// embed posts embeddings and returns the vectors, each checked to be of length 1.
func embed(t *testing.T, w *worker.Worker, body string) ([][]float32, *embedded) {
	t.Helper()
	resp, b := ask(t, w.URL()+"/v1/embeddings", nil, body)
	a := &embedded{}
	if err := json.Unmarshal(b, a); err != nil || resp.StatusCode != 200 || a.Object != "list" || a.Model != "stories260k" {
		t.Fatalf("%.200s: %d %.300s", body, resp.StatusCode, b)
	}
	var vectors [][]float32
	for i, d := range a.Data {
		var v []float32
		if d.Embedding[0] == '"' {
			var raw []byte // base64 in JSON
			if err := json.Unmarshal(d.Embedding, &raw); err != nil {
				t.Fatal(err)
			}
			for ; len(raw) >= 4; raw = raw[4:] {
				v = append(v, math.Float32frombits(binary.LittleEndian.Uint32(raw)))
			}
		} else if err := json.Unmarshal(d.Embedding, &v); err != nil {
			t.Fatal(err)
		}
		sum := 0.0
		for _, x := range v {
			sum += float64(x) * float64(x)
		}
		if d.Object != "embedding" || d.Index != i || len(v) != width || math.Abs(sum-1) > 1e-5 {
			t.Fatalf("%.200s: vector %d is %q %d of %d numbers, squared %v", body, i, d.Object, d.Index, len(v), sum)
		}
		vectors = append(vectors, v)
	}
	return vectors, a
}

func ids(n, from int) string {
	s := make([]string, n)
	for i := range s {
		s[i] = fmt.Sprint(3 + (from+7*i)%500)
	}
	return "[" + strings.Join(s, ",") + "]"
}

// TestEmbeddings: all forms of input and of the answer, with the same bits alone and in a list, cached and
// not; a mean is another vector than the last token's.
func TestEmbeddings(t *testing.T) {
	w := start(t, nil)
	mean := start(t, func(c *worker.Config) { c.EmbeddingPooling, c.StepTokens = "mean", 9 })
	resp, b := ask(t, w.URL()+"/tokenize", nil, `{"prompt":"Once upon a time"}`)
	var tokens struct{ Tokens json.RawMessage }
	if err := json.Unmarshal(b, &tokens); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, b)
	}
	for _, w := range []*worker.Worker{w, mean} {
		text, a := embed(t, w, `{"input":"Once upon a time"}`)
		if n := strings.Count(string(tokens.Tokens), ",") + 1; len(text) != 1 || a.Usage.Prompt != n || a.Usage.Total != n {
			t.Errorf("%d vectors, usage %+v of %d tokens", len(text), a.Usage, n)
		}
		for _, body := range []string{`{"input":["Once upon a time"],"model":"stories260k","user":"me","encoding_format":"float","dimensions":64}`,
			`{"input":` + string(tokens.Tokens) + `}`, `{"input":"Once upon a time","encoding_format":"base64","dimensions":null,"unknown":[1]}`} {
			if got, _ := embed(t, w, body); len(got) != 1 || !slices.Equal(got[0], text[0]) {
				t.Errorf("%s: another vector than the text alone", body)
			}
		}
		var all []string
		var alone [][]float32
		for i := range 9 {
			all = append(all, ids(1+20*i, i%2))
			v, _ := embed(t, w, `{"input":`+all[i]+`}`)
			alone = append(alone, v[0])
		}
		got, _ := embed(t, w, `{"input":[`+strings.Join(all, ",")+`]}`)
		for i := range alone {
			if len(got) != len(alone) || !slices.Equal(got[i], alone[i]) {
				t.Errorf("input %d has another vector in a list of %d", i, len(got))
			}
		}
		if full, a := embed(t, w, `{"input":`+ids(512, 1)+`}`); len(full) != 1 || a.Usage.Prompt != 512 {
			t.Errorf("a whole context: %+v", a.Usage)
		}
	}
	a, _ := embed(t, w, `{"input":"Once upon a time"}`)
	b2, _ := embed(t, mean, `{"input":"Once upon a time"}`)
	if slices.Equal(a[0], b2[0]) {
		t.Error("the mean is the last token's")
	}
	one, _ := embed(t, w, `{"input":[7]}`)
	if two, _ := embed(t, mean, `{"input":[7]}`); !slices.Equal(one[0], two[0]) {
		t.Error("the mean of one token is not that token's")
	}
}

// TestEmbeddingsRefused: in OpenAI's shape, with the field's name.
func TestEmbeddingsRefused(t *testing.T) {
	w := start(t, nil)
	many := func(one string, n int) string {
		return `{"input":[` + strings.TrimSuffix(strings.Repeat(one+",", n), ",") + `]}`
	}
	for _, c := range []struct {
		body   string
		status int
		param  string
		code   string
	}{
		{`{}`, 400, "input", ""}, {`{"input":null}`, 400, "input", ""}, {`{"input":""}`, 400, "input", ""}, {`{"input":[]}`, 400, "input", ""},
		{`{"input":["a",""]}`, 400, "input", ""}, {`{"input":[[1],[]]}`, 400, "input", ""}, {`{"input":7}`, 400, "input", ""}, {`{"input":["a",1]}`, 400, "input", ""},
		{`{"input":[600]}`, 400, "input", ""}, {`{"input":[-1]}`, 400, "input", ""}, {many(`"a"`, 257), 400, "input", ""},
		{`{"input":` + ids(513, 1) + `}`, 400, "input", "context_length_exceeded"}, {`{"input":"` + strings.Repeat("word ", 20000) + `"}`, 400, "input", "context_length_exceeded"},
		{`{"input":"a","dimensions":32}`, 400, "dimensions", ""}, {`{"input":"a","dimensions":0}`, 400, "dimensions", "greater_than_equal"},
		{`{"input":"a","encoding_format":"int8"}`, 400, "encoding_format", ""}, {`{"input":"a","encoding_format":""}`, 400, "encoding_format", ""},
		{`{"input":"a","model":"other"}`, 404, "model", "model_not_found"}, {`{"input":"a"`, 400, "", ""},
	} {
		resp, b := ask(t, w.URL()+"/v1/embeddings", nil, c.body)
		var a embedded
		if err := json.Unmarshal(b, &a); err != nil || resp.StatusCode != c.status || a.Error == nil || a.Error.Type != "invalid_request_error" || a.Error.Param != c.param || a.Error.Code != c.code {
			t.Errorf("%.80s: %d %.300s", c.body, resp.StatusCode, b)
		}
	}
	if got, _ := embed(t, w, many(`"a"`, 256)); len(got) != 256 || !slices.Equal(got[0], got[255]) {
		t.Errorf("%d vectors", len(got))
	}
}

// TestCohereEmbed: Cohere's API has the same vectors, and cuts texts that do not fit.
func TestCohereEmbed(t *testing.T) {
	w := start(t, nil)
	post := func(body string) (vectors [][]float32, packed []string, text string) {
		t.Helper()
		resp, b := ask(t, w.URL()+"/v2/embed", nil, body)
		var a struct {
			ID         string
			Embeddings struct {
				Float  [][]float32
				Base64 []string
			}
			Texts []string
			Meta  struct {
				Units struct {
					Tokens int `json:"input_tokens"`
				} `json:"billed_units"`
			}
			Type string `json:"response_type"`
		}
		if err := json.Unmarshal(b, &a); err != nil || resp.StatusCode != 200 || !strings.HasPrefix(a.ID, "embd-") || a.Type != "embeddings_by_type" || a.Meta.Units.Tokens == 0 || len(a.Texts) == 0 {
			t.Fatalf("%s: %d %.300s", body, resp.StatusCode, b)
		}
		return a.Embeddings.Float, a.Embeddings.Base64, a.Texts[0]
	}
	want, _ := embed(t, w, `{"input":["Once upon a time","Lily"]}`)
	got, _, text := post(`{"model":"stories260k","texts":["Once upon a time","Lily"],"input_type":"search_query"}`)
	if len(got) != 2 || !slices.Equal(got[0], want[0]) || !slices.Equal(got[1], want[1]) || text != "Once upon a time" {
		t.Errorf("other vectors, of %q", text)
	}
	if floats, packed, _ := post(`{"texts":["Lily"],"embedding_types":["base64"]}`); floats != nil || len(packed) != 1 || packed[0] == "" {
		t.Errorf("%v %q", floats, packed)
	}
	const long = "Once upon a time there was a dog. One day Lily went out"
	tokens := tell(t, w, "/v1/completions", `{"prompt":"`+long+`","max_tokens":1,"return_token_ids":true}`).Choices[0].Prompt
	list := func(ids []int32) string { b, _ := json.Marshal(ids); return string(b) }
	for how, ids := range map[string][]int32{"": tokens[:4], `,"truncate":"END"`: tokens[:4], `,"truncate":"START"`: tokens[len(tokens)-4:]} {
		of, _ := embed(t, w, `{"input":`+list(ids)+`}`)
		if got, _, _ := post(`{"texts":["` + long + `"],"max_tokens":4` + how + `}`); !slices.Equal(got[0], of[0]) {
			t.Errorf("%q: another vector than of %v", how, ids)
		}
	}
	huge := strings.TrimSuffix(strings.Repeat("dog ", 600), " ")
	post(`{"texts":["` + huge + `"]}`)
	for body, field := range map[string]string{
		`{"texts":["` + huge + `"],"truncate":"NONE"}`:    "texts",
		`{"texts":["a"],"output_dimension":3}`:            "output_dimension",
		`{"texts":["a"],"embedding_types":["int8"]}`:      "embedding_types",
		`{"texts":["a"],"images":["data:image/png;..."]}`: "images",
		`{"texts":["a",""]}`:                              "texts",
		`{"model":"m","input_type":"search_document"}`:    "texts",
	} {
		resp, b := ask(t, w.URL()+"/v2/embed", nil, body)
		if resp.StatusCode != 400 || !strings.Contains(string(b), `"param":"`+field+`"`) {
			t.Errorf("%.60s: %d %.200s", body, resp.StatusCode, b)
		}
	}
	empty(t, w)
}
