package faults

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
)

// embedded copies the embedded model to a folder, with changed files.
func embedded(t *testing.T, change map[string]string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "stories260k")
	if err := os.CopyFS(dir, os.DirFS(filepath.Join("..", "..", "internal", "model", "stories260k"))); err != nil {
		t.Fatal(err)
	}
	for name, text := range change {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// tiny writes another model with the embedded one's tokenizer.
func tiny(t *testing.T) string {
	t.Helper()
	c := modeltest.Tiny("llama")
	c.Vocab, c.MaxPositions = 512, 512
	dir := embedded(t, nil)
	if err := modeltest.WriteHF(dir, c, modeltest.HFOptions{Seed: 3, DType: kernels.F32}); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestJoin: a worker that can be paired with nobody is refused, with the field
// and both values in the status and the log, and gets no request; one that
// differs in block size only serves.
func TestJoin(t *testing.T) {
	t.Parallel()
	r := cluster.Up(t, "--log-level", "info")
	list := recorded(t, r, 12)
	f, err := r.Fleet()
	if err != nil {
		t.Fatal(err)
	}
	good := f.Get("prefill-0").Instance

	config, err := os.ReadFile(filepath.Join("..", "..", "internal", "model", "stories260k", "tokenizer_config.json"))
	if err != nil {
		t.Fatal(err)
	}
	template := strings.Replace(string(config), "{", `{"chat_template": "{{ messages[0].content }}",`, 1)
	for _, c := range []struct {
		name, field, ours string
		role              fleet.Role
		args              []string
	}{
		{"other-model", "model_fingerprint", good.ModelFingerprint, fleet.Decode, []string{"--model", tiny(t), "--served-name", "stories260k"}},
		{"other-name", "model", good.Model, fleet.Prefill, []string{"--served-name", "stories"}},
		{"other-tokenizer", "tokenizer_fingerprint", good.TokenizerFingerprint, fleet.Prefill, []string{"--model", embedded(t, map[string]string{"tokenizer_config.json": template})}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := r.Worker(t, c.role, append(c.args, "--id", c.name)...)
			refused(t, r, list, c.name, c.field, c.ours)
			p.Signal(os.Interrupt)
			if code := p.Exit(t, 10*time.Second); code != 0 {
				t.Errorf("exit code %d", code)
			}
		})
	}
	t.Run("older-protocol", func(t *testing.T) { olderProtocol(t, r, list, good) })
	t.Run("block-size", func(t *testing.T) {
		r.Worker(t, fleet.Prefill, "--id", "small", "--block-tokens", "4")
		r.Worker(t, fleet.Decode, "--id", "large", "--block-tokens", "64")
		r.WaitServing(t, 20*time.Second, 2, 2)
		served := map[string]int{}
		for _, res := range traffic(t, r, list) {
			served[res.Prefill]++
			served[res.Decode]++
		}
		if served["small"] == 0 || served["large"] == 0 {
			t.Errorf("answers by worker: %v", served)
		}
	})
	cluster.Wait(t, afterKnown+slack, "ledgers empty", r.Idle)
}

// traffic sends every request and checks the answers.
func traffic(t *testing.T, r *cluster.Router, list []*ask) []result {
	t.Helper()
	l := startLoad(t, r, list, 8)
	l.answered(t, 40, nil)
	results := l.stop()
	for _, res := range results {
		if !res.Good() || res.Text != res.want {
			t.Errorf("%v\n got %q\nwant %q", res.Reply, res.Text, res.want)
		}
	}
	return results
}

// refused checks that id is live, named as refused, and given nothing.
func refused(t *testing.T, r *cluster.Router, list []*ask, id, field, ours string) {
	t.Helper()
	var theirs string
	cluster.Wait(t, 20*time.Second, "refusal of "+id, func() error {
		f, err := r.Fleet()
		if err != nil {
			return err
		}
		for _, ref := range f.Refusals {
			if ref.ID == id && ref.Mismatch.Field == field {
				if theirs = ref.Mismatch.Prefill; theirs == ours {
					theirs = ref.Mismatch.Decode
				}
				return nil
			}
		}
		return &notRefused{f.Refusals}
	})
	out, _, _ := r.CLI(t, "status")
	logged := ""
	cluster.Wait(t, 10*time.Second, "the log says so", func() error {
		for line := range strings.SplitSeq(r.Stderr.String(), "\n") {
			if contains(line, "id="+id+" ") && contains(line, "incompatible") {
				logged = line
				return nil
			}
		}
		return errors.New("it does not")
	})
	for where, text := range map[string]string{"status": out, "log": logged} {
		for _, part := range []string{id, field, ours, theirs} {
			if part == "" || !contains(text, part) {
				t.Errorf("no %q in the %s:\n%s", part, where, text)
			}
		}
	}
	for _, res := range traffic(t, r, list) {
		if res.Prefill == id || res.Decode == id {
			t.Errorf("%s was paired: %v", id, res.Reply)
		}
	}
}

type notRefused struct{ refusals []fleet.Refusal }

func (e *notRefused) Error() string {
	out := "not refused:"
	for _, r := range e.refusals {
		out += " " + r.String()
	}
	return out
}

// olderProtocol announces a worker that speaks an older protocol only, and
// counts what it is asked.
func olderProtocol(t *testing.T, r *cluster.Router, list []*ask, good fleet.Instance) {
	var mu sync.Mutex
	var asked []string
	old := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if q.Method == http.MethodPost {
			asked = append(asked, q.URL.Path)
		}
		http.Error(w, "an older worker", http.StatusNotFound)
	}))
	defer old.Close()
	conn, err := fleet.Connect(fleet.ConnConfig{URL: r.JoinLine(t).URL, Ring: r.Ring(t), Name: "older"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	inst := good
	inst.ID, inst.Epoch, inst.Role, inst.URL = "older", fleet.NewEpoch(), fleet.Decode, old.URL
	inst.KVAddr = net.JoinHostPort("127.0.0.1", "9")
	inst.ProtocolMin, inst.ProtocolMax = good.ProtocolMin-1, good.ProtocolMin-1
	a, err := fleet.Announce(fleet.AnnouncerConfig{Conn: conn, Instance: inst})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close(context.Background())
	refused(t, r, list, "older", "protocol", fmt.Sprintf("%d-%d", good.ProtocolMin, good.ProtocolMax))
	mu.Lock()
	defer mu.Unlock()
	if len(asked) > 0 {
		t.Errorf("it was asked %v", asked)
	}
}
