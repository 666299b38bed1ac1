package worker_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/worker"
)

// spoilt is the embedded model with a final norm that is not a number.
func spoilt(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "spoilt")
	if err := os.CopyFS(dir, os.DirFS(filepath.Join("..", "internal", "model", "stories260k"))); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "model.safetensors")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head := 8 + binary.LittleEndian.Uint64(b)
	var tensors map[string]struct {
		At []uint64 `json:"data_offsets"`
	}
	if err := json.Unmarshal(b[8:head], &tensors); err != nil {
		t.Fatal(err)
	}
	at := tensors["model.norm.weight"].At
	copy(b[head+at[0]:head+at[1]], bytes.Repeat([]byte{0xff}, int(at[1]-at[0])))
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestSpoiltModel: a model whose logits are NaN is an error that names it, from
// one worker and from a pair, and nothing is left behind.
func TestSpoiltModel(t *testing.T) {
	dir := spoilt(t)
	p, d := pair(t, func(p, d *worker.Config) { p.Model, d.Model = dir, dir })
	wrong := func(how string, status int, body []byte) {
		t.Helper()
		var e struct {
			Error struct{ Code, Type, Message string }
		}
		if err := json.Unmarshal(body, &e); err != nil || status != 500 || e.Error.Code != "model_output_invalid" || e.Error.Type != "server_error" ||
			!strings.Contains(e.Error.Message, `"spoilt" is not a number`) {
			t.Errorf("%s: %d %s", how, status, body)
		}
	}
	for _, body := range []string{
		`{"prompt":"Once","max_tokens":4}`,
		`{"prompt":"Once","max_tokens":4,"temperature":0,"logprobs":2,"n":2}`,
		`{"prompt":"Once","max_tokens":4,"stream":true}`,
		`{"prompt":"Once","max_tokens":4,"min_tokens":2}`, // bans the end, which is no token then either
		`{"prompt":"Once upon","max_tokens":1,"prompt_logprobs":1}`,
		`{"prompt":"Once upon","max_tokens":0,"echo":true,"logprobs":1}`,
	} {
		resp, b := ask(t, d.URL()+"/v1/completions", nil, body)
		wrong(body, resp.StatusCode, b)
		if o := resp.Header.Get("x-xpyd-outcome"); o != string(ticket.Invalid) {
			t.Errorf("%s: outcome %q", body, o)
		}
		link := ticket.NewLink().String()
		report := leg(p, link)
		resp, b = ask(t, d.URL()+"/v1/completions", linked(p, link), body)
		wrong("of a pair, "+body, resp.StatusCode, b)
		if o := resp.Header.Get("x-xpyd-outcome"); o != string(ticket.Refused) {
			t.Errorf("of a pair, %s: outcome %q", body, o)
		}
		if r := <-report; !strings.HasPrefix(r, "502 invalid ") {
			t.Errorf("%s: the leg got %s", body, r)
		}
	}
	empty(t, p)
	empty(t, d)
}
