package hostile

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
	"github.com/xpyd/xpyd/internal/fleet"
)

// linkRows: KV from somewhere else.
var linkRows = []row{
	{"a hostile prefill worker is named by link headers", "its poisoned KV, also for later requests of the same prefix", poison},
	{"a client brings a token of the fleet", "nothing: but it may not be passed on", func(t *testing.T, s *scene) {
		g := s.asks("POST", s.URL+"/v1/completions", completion, map[string]string{"x-xpyd-fleet": "3238efab.Wm_d2CqJCHqp8aO_uclNZHIYSc8Y0T3Y", "x-xpyd-link": strings.Repeat("ab", 16)})
		if g.Status != 200 {
			t.Errorf("a client's own headers are nothing to us: %d %.200s", g.Status, g.Text)
		}
	}},
}

// hostileModel is stories260k with the K and V projections of each layer
// exchanged.
func hostileModel(t *testing.T) string {
	t.Helper()
	const from = "../../internal/model/stories260k"
	dir := filepath.Join(publicDir(t), "stories260k")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"} {
		b, err := os.ReadFile(filepath.Join(from, name))
		if err != nil {
			t.Fatal(err)
		}
		if name == "model.safetensors" {
			n := binary.LittleEndian.Uint64(b)
			head := strings.NewReplacer("k_proj", "v_proj", "v_proj", "k_proj").Replace(string(b[8 : 8+n]))
			b = append(append(b[:8:8], head...), b[8+n:]...)
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
		old := time.Now().Add(-time.Hour) // or its fingerprint would not be remembered
		if err := os.Chtimes(path, old, old); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// publicDir is a folder that the attacker may use.
func publicDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "xpyd-hostile-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	return dir
}

// hostilePrefill starts xpyd's own prefill worker with that model, as the
// attacker. It says that its model is the right one: whoever owns the worker
// owns the file that remembers the fingerprint.
func hostilePrefill(t *testing.T, fingerprint string) (kvAddr string, epoch uint64) {
	t.Helper()
	model, cache, binary := hostileModel(t), publicDir(t), binaryFor(t, cluster.Binary(t))
	start := func() (p *cluster.Process, url string) {
		addr := cluster.Port(t)
		cmd := exec.Command(binary, "prefill", "--id", "hostile", "--trust-everyone", "--model", model, "--device", "cpu", "--kv-memory", "16MiB", "--listen", addr, "--kv-listen", kvAddr, "--log-level", "warn")
		cmd.Dir = "/"
		if os.Geteuid() == 0 {
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: credential()}
		}
		return cluster.StartCommand(t, cmd, []string{"XDG_CACHE_HOME=" + cache, "HOME=" + cache}), "http://" + addr
	}
	kvAddr = cluster.Port(t)
	up := func(url string) (says struct{ Epoch uint64 }) {
		cluster.Wait(t, 20*time.Second, "the hostile worker", func() error {
			resp, err := http.Get(url + "/debug/ledger") // it trusts everyone
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			return json.NewDecoder(resp.Body).Decode(&says)
		})
		return says
	}
	p, url := start()
	up(url)
	p.Kill()
	p.Exit(t, 5*time.Second)
	remembered, err := filepath.Glob(filepath.Join(cache, "xpyd", "fingerprints", "*.json"))
	if err != nil || len(remembered) != 1 {
		t.Fatalf("no fingerprint is remembered: %v %v", remembered, err)
	}
	b, err := os.ReadFile(remembered[0])
	if err != nil {
		t.Fatal(err)
	}
	var record map[string]string
	if err := json.Unmarshal(b, &record); err != nil {
		t.Fatal(err)
	}
	record["fingerprint"] = fingerprint
	if b, err = json.Marshal(record); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(remembered[0], b, 0o644); err != nil {
		t.Fatal(err)
	}
	_, url = start()
	return kvAddr, up(url).Epoch
}

// poison names the hostile worker to a decode worker: as a stranger, and as
// somebody who has got hold of a token of that worker's, but not of the secret.
func poison(t *testing.T, s *scene) {
	client := cluster.NewClient(t)
	body := func(i int) string {
		return fmt.Sprintf(`{"model":"stories260k","prompt":"%s One day, number %d, they all went to the park","max_tokens":24,"ignore_eos":true,"temperature":0}`,
			strings.Repeat("The little dog likes to play with a big red ball. ", 4), i)
	}
	ask := func(i int) string {
		got := cluster.Post(t.Context(), client, s.URL+"/v1/completions", body(i))
		if !got.Good() {
			t.Fatalf("%v", got)
		}
		return got.Text
	}
	d := s.member(fleet.Decode)
	kvAddr, epoch := hostilePrefill(t, d.ModelFingerprint)
	header := map[string]string{"x-xpyd-link": strings.Repeat("5a", 16), "x-xpyd-prefill": "hostile", "x-xpyd-prefill-epoch": fmt.Sprint(epoch), "x-xpyd-prefill-kv": kvAddr}
	refused(t, "as a stranger", s.asks("POST", d.URL+"/v1/completions", body(0), header))
	name, value := s.MemberToken(t, d)
	header[name] = value
	if g := s.asks("POST", d.URL+"/v1/completions", body(0), header); g.Status == 200 || !strings.Contains(g.Text, "fleet_secret") {
		t.Errorf("with a stolen token: %d %.300s", g.Status, g.Text)
	}
	// Each worker computes it from the start, or has it from one that did.
	want := ask(0)
	for range 8 {
		if text := ask(0); text != want {
			t.Errorf("poisoned: %q, and %q", want, text)
		}
	}
	alone := cluster.Up(t, "--device", "cpu")
	if got := cluster.Post(t.Context(), client, alone.URL+"/v1/completions", body(0)); got.Text != want {
		t.Errorf("poisoned: %q, elsewhere %q", want, got.Text)
	}
}

// portRows: other ports than HTTP, files, and what everybody can see.
var portRows = []row{
	{"KV events are subscribed to", "the token ids of every prompt", func(t *testing.T, s *scene) {
		m := s.member(fleet.Prefill)
		// ZMTP's greeting with the mechanism NULL, READY as a SUB socket, and a
		// subscription to everything.
		greeting := "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + strings.Repeat("\x00", 16+32)
		ready := "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
		var text string
		for _, addr := range []string{m.KVEvents, m.KVReplay} {
			g := s.does(act{Do: "raw", Addrs: []string{addr}, Body: greeting + ready + "\x00\x01\x01"})
			text += g.Text
		}
		if strings.Contains(text, "BlockStored") || strings.Contains(text, "READY") {
			t.Errorf("the publisher talks to a stranger: %.200q", text)
		}
	}},
	{"a stranger shakes hands on the KV port", "a session, and tickets", func(t *testing.T, s *scene) {
		m := s.member(fleet.Prefill)
		g := s.does(act{Do: "raw", Addrs: []string{m.KVAddr}, Body: "xpyd-kv 1-9\n"})
		if !strings.HasPrefix(g.Text, "xpyd-kv wants a fleet secret") || strings.Contains(g.Text, "stories260k") {
			t.Errorf("it answers as to a peer: %.200q", g.Text)
		}
	}},
	{"strangers hold the KV ports", "all of a worker's places for handshakes", func(t *testing.T, s *scene) {
		p := s.member(fleet.Prefill)
		release := s.holds(1500, p.KVAddr)
		defer release()
		late := s.Worker(t, fleet.Decode, "--id", "late")
		s.WaitServing(t, 20*time.Second, 2, 3) // its probe goes through a session of its own
		late.Signal(syscall.SIGTERM)
		if code := late.Exit(t, 20*time.Second); code != 0 {
			t.Errorf("exit code %d", code)
		}
		s.WaitServing(t, 20*time.Second, 2, 2)
	}},
	{"what everybody sees of processes", "the join URL with its password, in ps", func(t *testing.T, s *scene) {
		w := s.Worker(t, fleet.Decode, "--id", "seen")
		s.WaitServing(t, 20*time.Second, 2, 3)
		g := s.does(act{Do: "cmdlines"})
		if !strings.Contains(g.Text, "decode\x00") {
			t.Fatalf("no worker in sight: %.200q", g.Text)
		}
		for what, secret := range s.Secrets(t) {
			if strings.Contains(g.Text, secret) {
				t.Errorf("%s shows", what)
			}
		}
		w.Signal(syscall.SIGTERM)
		w.Exit(t, 20*time.Second)
		s.WaitServing(t, 20*time.Second, 2, 2)
	}},
	{"the data folder is read", "the admin token, if its rights were wrong", func(t *testing.T, s *scene) {
		if credential() == nil {
			t.Log("not root: another user cannot be tried")
			return
		}
		for _, name := range []string{"admin-token", "join-url", "fleet-secret"} {
			if g := s.does(act{Do: "read", Path: filepath.Join(s.Data, name)}); g.Err == "" {
				t.Errorf("%s can be read: %d bytes", name, len(g.Text))
			}
		}
	}},
	{"the data folder is made beforehand", "the admin token in his file, a root-only file overwritten", squatted},
}

// squatted: the folder of XPYD_DATA is the attacker's, with links in it.
func squatted(t *testing.T, s *scene) {
	if credential() == nil {
		t.Log("not root: another user cannot be tried")
		return
	}
	precious := filepath.Join(t.TempDir(), "precious")
	if err := os.WriteFile(precious, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(publicDir(t), "data")
	names := []string{"admin-token", ".admin-token", "join-url", ".join-url", "fleet-secret", ".fleet-secret", "lock", "admin-url"}
	if g := s.does(act{Do: "squat", Path: data, Target: precious, Addrs: names}); g.Err != "" {
		t.Fatal(g.Err)
	}
	for _, args := range [][]string{{"router", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}, {"up", "--device", "cpu", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}, {"status"}, {"drain", "decode-0"}} {
		_, errs, code := cluster.Run(t, append(args, "--data", data)...)
		if code == 0 || !strings.Contains(errs, data) || !strings.Contains(errs, fmt.Sprint(stranger)) {
			t.Errorf("%v: exit code %d, %s", args, code, errs)
		}
	}
	if b, err := os.ReadFile(precious); err != nil || string(b) != "precious" {
		t.Errorf("a link was followed: %q %v", b, err)
	}
	// A URL that he leaves is not asked with anybody's token.
	asked := make(chan string, 1)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case asked <- r.Header.Get("Authorization"):
		default:
		}
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(ln) // until it is closed
	}()
	defer func() {
		server.Close()
		<-done
	}()
	his := filepath.Join(publicDir(t), "his")
	if err := os.Mkdir(his, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"admin-url": "http://" + ln.Addr().String(), "admin-token": "x"} {
		if err := os.WriteFile(filepath.Join(his, name), []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(his, stranger, stranger); err != nil {
		t.Fatal(err)
	}
	p := cluster.Start(t, []string{"XPYD_ADMIN_TOKEN=the-real-one"}, "status", "--data", his)
	if code := p.Exit(t, 20*time.Second); code == 0 {
		t.Error("status of a stranger's folder")
	}
	select {
	case token := <-asked:
		t.Errorf("his socket was asked, with %q", token)
	default:
	}
}

// requestRows: what a client of the public port may ask for.
var requestRows = []row{
	{"an answer too large", "1.7 GB of a decode worker, breakers open, bystanders refused", func(t *testing.T, s *scene) {
		body := `{"model":"stories260k","n":128,"logprobs":20,"max_tokens":400,"ignore_eos":true,"temperature":1,"prompt":[` + strings.Repeat(`"Once",`, 31) + `"Once"]}`
		for range 10 {
			var e struct {
				Error struct{ Message, Param string }
			}
			g := s.asks("POST", s.URL+"/v1/completions", body, nil)
			if err := json.Unmarshal([]byte(g.Text), &e); err != nil || g.Status != 400 || e.Error.Param == "" {
				t.Errorf("%d %.200s", g.Status, g.Text)
			}
		}
	}},
	{"a body without an end", "a request that ends with its connection", func(t *testing.T, s *scene) {
		for _, url := range []string{s.URL, s.Admin, s.member(fleet.Decode).URL} {
			g := s.does(act{Do: "raw", Addrs: []string{strings.TrimPrefix(url, "http://")},
				Body: "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: identity\r\n\r\n" + completion})
			if !strings.HasPrefix(g.Text, "HTTP/1.1 40") || strings.Count(g.Text, "HTTP/1.1") != 1 {
				t.Errorf("%s: %.200q %s", url, g.Text, g.Err)
			}
		}
	}},
	{"the admin port is held", "the admin port, for good", func(t *testing.T, s *scene) {
		release := s.holds(400, strings.TrimPrefix(s.Admin, "http://"))
		release()
		cluster.Wait(t, 20*time.Second, "the admin port", func() error { _, err := s.Fleet(); return err })
	}},
	{"the admin API without its token", "nothing", func(t *testing.T, s *scene) {
		for _, path := range []string{"/admin/v1/instances", "/debug/ledger", "/debug/pprof/heap", "/dashboard/session", "/admin/v1/events", "/admin/v1/secret", "/admin/v1/revocations"} {
			if g := s.asks("GET", s.Admin+path, "", map[string]string{"Authorization": "Bearer x"}); g.Status != 401 {
				t.Errorf("%s: %d", path, g.Status)
			}
		}
	}},
}
