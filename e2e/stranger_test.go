package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/apikey"
	"github.com/xpyd/xpyd/worker"
)

// swapped is stories260k with K and V of each layer in each other's place, and a
// remembered fingerprint that says otherwise: what a hostile prefill worker has.
func swapped(t *testing.T) string {
	t.Helper()
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	dir := filepath.Join(t.TempDir(), "stories260k")
	weights := filepath.Join(dir, "model.safetensors")
	when := time.Now().Add(-time.Hour)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.CopyFS(dir, os.DirFS("../internal/model/stories260k")))
	must(os.Chtimes(weights, when, when))
	m, err := model.Open(t.Context(), dir, model.Options{Log: testLog()})
	must(err)
	must(m.Close())
	b, err := os.ReadFile(weights)
	must(err)
	for _, step := range [][2]string{{"k_proj", "?_proj"}, {"v_proj", "k_proj"}, {"?_proj", "v_proj"}} {
		b = bytes.ReplaceAll(b, []byte(step[0]), []byte(step[1]))
	}
	must(os.WriteFile(weights, b, 0o600))
	must(os.Chtimes(weights, when, when))
	return dir
}

// TestPoison: whoever is in no fleet names his own prefill worker, whose KV is
// wrong and whose digests are right, to a decode worker. What he gets there would
// be everybody's who has the same prefix.
func TestPoison(t *testing.T) {
	hostile := startWorker(t, fleet.Prefill, func(c *worker.Config) { c.Model, c.LeaseTime = swapped(t), time.Second })
	const prefix = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her friends. One day, "
	body := fmt.Sprintf(`{"prompt":%q,"max_tokens":24,"temperature":0}`, prefix)
	text := func(b []byte) string {
		t.Helper()
		var a answer
		if err := json.Unmarshal(b, &a); err != nil || len(a.Choices) != 1 {
			t.Fatalf("%v: %s", err, b)
		}
		return a.Choices[0].Text
	}
	_, b := post(t, startWorker(t, fleet.Decode, nil).URL()+"/v1/completions", nil, body)
	want := text(b)

	key, k := apikey.New("proxy")
	keys := filepath.Join(t.TempDir(), "keys.yaml")
	if err := apikey.Append(keys, k); err != nil {
		t.Fatal(err)
	}
	secret := trust.NewSecret()
	ring, err := trust.NewRing(secret)
	if err != nil {
		t.Fatal(err)
	}
	i := hostile.Instance()
	links := func(link string) map[string]string {
		return map[string]string{"x-xpyd-link": link, "x-xpyd-prefill": i.ID, "x-xpyd-prefill-epoch": fmt.Sprint(i.Epoch), "x-xpyd-prefill-kv": i.KVAddr}
	}
	// attack has the hostile worker named to d by links, and returns d's answer.
	attack := func(d *worker.Worker, header map[string]string) (int, []byte) {
		t.Helper()
		link := ticket.NewLink().String()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, hostile.URL()+"/xpyd/v1/prefill", strings.NewReader(`{"link":"`+link+`"}`))
			if err != nil {
				return
			}
			if resp, err := http.DefaultClient.Do(req); err == nil {
				resp.Body.Close()
			}
		}()
		defer func() { cancel(); <-ended }()
		all := links(link)
		maps.Copy(all, header)
		return post(t, d.URL()+"/v1/completions", all, body)
	}
	victim := func(d *worker.Worker) string {
		t.Helper()
		inst := d.Instance()
		status, b := post(t, d.URL()+"/v1/completions", map[string]string{trust.Header: secret.Token(trust.HTTP, trust.Member(inst.ID, inst.Epoch))}, body)
		if status != 200 {
			t.Fatalf("%d %s", status, b)
		}
		return text(b)
	}

	// The attack is one: this is what a worker that trusts everyone has given up.
	open := startWorker(t, fleet.Decode, nil)
	if status, b := attack(open, nil); status != 200 || text(b) == want {
		t.Errorf("the hostile worker is harmless: %d %s", status, b)
	}
	if got := victim(open); got == want {
		t.Error("a poisoned prefix is harmless: the test shows nothing")
	}

	d := startWorker(t, fleet.Decode, func(c *worker.Config) { c.APIKeysFile = keys }, func(d *worker.Deps) { d.Ring = ring })
	if status, b := attack(d, nil); status != 401 {
		t.Errorf("by links: %d %s", status, b)
	}
	bearer := map[string]string{"Authorization": "Bearer " + key}
	if status, b := attack(d, bearer); status != 403 {
		t.Errorf("by links and a key: %d %s", status, b)
	}
	peer := map[string]string{"x-xpyd-kv-peer": fmt.Sprintf("%s %d %s %s 32", i.ID, i.Epoch, hostile.URL(), i.KVAddr)}
	maps.Copy(peer, bearer)
	if status, b := post(t, d.URL()+"/v1/completions", peer, body); status != 403 {
		t.Errorf("as a peer: %d %s", status, b)
	}
	// A key may name any address of this machine as a foreign proxy does: there
	// kvconn asks for the secret.
	status, b := post(t, hostile.URL()+"/v1/completions", nil, strings.TrimSuffix(body, "}")+`,"kv_transfer_params":{"do_remote_decode":true}}`)
	var kept answer
	if err := json.Unmarshal(b, &kept); err != nil || status != 200 || len(kept.KV) == 0 {
		t.Fatalf("%d %s", status, b)
	}
	if status, b := post(t, d.URL()+"/v1/completions", bearer, strings.TrimSuffix(body, "}")+`,"kv_transfer_params":`+string(kept.KV)+`}`); status != 502 {
		t.Errorf("by kv_transfer_params: %d %s", status, b)
	}
	if got := victim(d); got != want {
		t.Errorf("the victim got %q, want %q", got, want)
	}
}
