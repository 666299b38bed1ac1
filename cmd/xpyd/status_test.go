package main

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/datadir"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kernels/cpu"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// TestStatusBreaker: the table says which workers get no requests, until when
// and why, and how many streams are to move away, or have.
func TestStatusBreaker(t *testing.T) {
	var s fleetStatus
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	err := json.Unmarshal([]byte(`{"ready":true,"instances":[
		{"id":"d0","role":"decode","state":"live","probed":true,"breaker":{"state":"open","until":"2026-01-02T03:04:07Z","why":"5 failures in a row"}},
		{"id":"d1","role":"decode","state":"live","probed":true,"breaker":{"state":"half_open","why":"5 failures in a row"}},
		{"id":"d2","role":"decode","state":"live","probed":true,"breaker":{"state":"ejected","until":"2026-01-02T03:04:20Z","why":"50% of its requests fail, of its peers' 0%"}},
		{"id":"d3","role":"decode","state":"live","probed":true,"breaker":{"state":"closed"}},
		{"id":"d4","role":"decode","state":"live","probed":true,"draining":true,"to_move":2},
		{"id":"d5","role":"decode","state":"live","probed":true,"moved":{"shortage":1,"balance":3}}]}`), &s)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := s.print(&b, now); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string][]string{
		"d0": {"live,open ", "5 failures in a row, for 2s"}, "d1": {"live,half_open ", "5 failures in a row"},
		"d2": {"live,ejected ", "50% of its requests fail, of its peers' 0%, for 15s"}, "d3": {"live "}, "d4": {"live,draining ", "2 streams to move"},
		"d5": {"1 stream moved away: short of KV blocks; 3 streams moved away: slower than its peers"},
	} {
		for line := range strings.Lines(b.String()) {
			if !strings.HasPrefix(line, id) {
				continue
			}
			for _, w := range want {
				if !strings.Contains(line, w) {
					t.Errorf("%q is not in %q", w, line)
				}
			}
			if id == "d3" && strings.Contains(line, "closed") {
				t.Errorf("%q", line)
			}
		}
	}
}

// TestStatusLapses: how long a worker has been live is measured by the router's clock and not
// reset by a late heartbeat; the note mentions those.
func TestStatusLapses(t *testing.T) {
	t.Parallel()
	d := &desk{answers: map[string][]string{instancesPath: {`{"ready":true,"at":"2026-01-02T03:04:05Z","link":{"up":true},"instances":[
		{"id":"d0","role":"decode","state":"live","probed":true,"since":"2026-01-02T02:04:05Z","lapses":3,"lapsed":"2026-01-02T03:03:55Z"},
		{"id":"d1","role":"decode","state":"live","probed":true,"since":"2026-01-02T02:04:05Z","lapses":3,"lapsed":"2026-01-02T02:14:05Z"}]}`}}}
	out, errs, code := at(t, t.Context(), d, "status")
	if code != 0 || strings.Count(out, " 1h0m0s ") != 2 || strings.Count(out, "late heartbeats: 3, last 10s ago") != 1 {
		t.Errorf("%d %q %q", code, out, errs)
	}
}

// TestStatusNamesake: a note says that a second process has a worker's id, and which.
func TestStatusNamesake(t *testing.T) {
	t.Parallel()
	d := &desk{answers: map[string][]string{instancesPath: {`{"ready":true,"link":{"up":true},"instances":[
		{"id":"prefill-0","role":"prefill","state":"live","probed":true,"namesake":"decode at http://127.0.0.1:7, pid 9"}]}`}}}
	out, errs, code := at(t, t.Context(), d, "status")
	if code != 0 || !strings.Contains(out, "another process has this id, and is not used: decode at http://127.0.0.1:7, pid 9") {
		t.Errorf("%d %q %q", code, out, errs)
	}
}

// TestStatusLonely: a note says that an engine's dialect has no other half.
func TestStatusLonely(t *testing.T) {
	t.Parallel()
	d := &desk{answers: map[string][]string{instancesPath: {`{"link":{"up":true},"instances":[
		{"id":"v0","role":"decode","state":"live","dialect":"vllm-nixl"},{"id":"v1","role":"prefill","state":"gone","dialect":"vllm-nixl"},
		{"id":"s0","role":"decode","state":"live","dialect":"sglang"},{"id":"s1","role":"prefill","state":"live","dialect":"sglang"},
		{"id":"n0","role":"decode","state":"live","dialect":"native"},{"id":"o0","role":"decode","state":"live","dialect":"openai"}]}`}}}
	out, errs, code := at(t, t.Context(), d, "status")
	if code != 0 || strings.Count(out, "to pair with") != 1 || !strings.Contains(out, "nobody of its dialect, vllm-nixl, to pair with") {
		t.Errorf("%d %q %q", code, out, errs)
	}
}

// TestStatusRouters: a line for each other router, and engines that only embed
// say so.
func TestStatusRouters(t *testing.T) {
	var s fleetStatus
	if err := json.Unmarshal([]byte(`{"ready":true,"router":"00000000000000aa","routers":[
		{"id":"00000000000000bb","silent_ms":20.4,"legs":12,"workers":4},{"id":"00000000000000cc","silent_ms":1500,"legs":0,"workers":0}],
		"instances":[{"id":"e","role":"decode","state":"live","probed":true,"embeds_only":true}]}`), &s); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := s.print(&b, time.Now()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"router 00000000000000bb: heard 20ms ago, 12 legs in flight to 4 workers (this one is 00000000000000aa)\n",
		"router 00000000000000cc: heard 1.5s ago, 0 legs", "embeds only\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in\n%s", want, b.String())
		}
	}
}

// TestAdminTLS: the commands believe the certificate that the router on this
// machine points to, or --admin-ca, and no other.
func TestAdminTLS(t *testing.T) {
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"ready":true}`)) }))
	defer srv.Close()
	dir, err := datadir.Own(filepath.Join(t.TempDir(), "data"))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	data := dir.Path()
	cert := filepath.Join(data, "cert.pem")
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(data, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("cert.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})))
	write(fileAdmin, srv.URL+"\n")
	f := func(a adminFlags, want string) {
		t.Helper()
		var s fleetStatus
		err := a.call(t.Context(), "GET", "/", nil, &s)
		if want == "" && (err != nil || !s.Ready) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	f(adminFlags{data: data}, "certificate signed by unknown authority")
	f(adminFlags{data: data, ca: cert}, "")
	f(adminFlags{data: data, ca: filepath.Join(data, fileAdmin)}, "no certificates in PEM")
	write(fileAdminCert, cert+"\n")
	f(adminFlags{data: data}, "")
}

func TestPool(t *testing.T) {
	for want, bytes := range map[string]int64{"12%": 0, "12% of 1 MiB": 4096, "12% of 256 MiB": 256 << 20, "12% of 36.5 GiB": 73 << 29} {
		if got := pool(0.12, bytes); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestGPU(t *testing.T) {
	for want, g := range map[string]fleet.GPU{
		"-":                         {},
		"87% 61/80 GiB 540 W 63 °C": {Busy: 0.87, MemoryUsed: 61 << 30, MemoryTotal: 80 << 30, Watts: 540.2, Celsius: 63},
		"5%":                        {Busy: 0.05},
	} {
		if got := gpu(&fleet.Member{Instance: fleet.Instance{Numerics: cuda.Numerics, Load: fleet.Load{GPU: g}}}); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	for want, m := range map[string]fleet.Instance{
		"cuda:2 5%":         {Devices: []fleet.Device{{Name: "cuda:2", PCI: "0000:17:00.0"}}, Load: fleet.Load{GPU: fleet.GPU{Busy: 0.05}}},
		"cuda:0 cuda:1":     {Devices: []fleet.Device{{Name: "cuda:0"}, {Name: "cuda:1"}}},
		"0000:17:00.0":      {Devices: []fleet.Device{{PCI: "0000:17:00.0"}}},
		"cuda:MIG-0123abcd": {Devices: []fleet.Device{{Name: "cuda:MIG-0123abcd-1234-1234"}}},
		"-":                 {Devices: []fleet.Device{{}}},
	} {
		if got := gpu(&fleet.Member{Instance: m}); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if got := gpu(&fleet.Member{Instance: fleet.Instance{Numerics: cpu.Numerics}}); got != "cpu" {
		t.Errorf("a worker on the CPU: %q", got)
	}
}

// TestStatusGPUs: a table says who is on which GPU, by machine; without GPUs there is none.
func TestStatusGPUs(t *testing.T) {
	t.Parallel()
	d := &desk{answers: map[string][]string{instancesPath: {`{"ready":true,"link":{"up":true},"instances":[
		{"id":"p0","role":"prefill","state":"live","machine":"a","devices":[{"name":"cuda:10","uuid":"GPU-x","pci":"0000:aa:00.0","model":"A GPU"}]},
		{"id":"d0","role":"decode","state":"live","machine":"a","devices":[{"name":"cuda:9","uuid":"GPU-y","pci":"0000:99:00.0","model":"A GPU"}]},
		{"id":"d1","role":"decode","state":"suspect","machine":"a","devices":[{"name":"cuda:9","uuid":"GPU-y","pci":"0000:99:00.0","model":"A GPU"}]},
		{"id":"d2","role":"decode","state":"dead","machine":"a","devices":[{"name":"cuda:9","uuid":"GPU-y","pci":"0000:99:00.0","model":"A GPU"}]},
		{"id":"d3","role":"decode","state":"live","machine":"b","devices":[{"pci":"0000:99:00.0"}]}]}`, `{"ready":true,"instances":[{"id":"c0","role":"decode","state":"live"}]}`}}}
	out, errs, code := at(t, t.Context(), d, "status")
	var rows []string
	_, table, _ := strings.Cut(out, "\n\nGPU ")
	for line := range strings.Lines(table) {
		rows = append(rows, strings.Join(strings.Fields(line), " "))
	}
	want := []string{"MODEL UUID PCI WORKERS", "cuda:9 A GPU GPU-y 0000:99:00.0 d0, d1", "cuda:10 A GPU GPU-x 0000:aa:00.0 p0", "- - - 0000:99:00.0 d3"}
	if code != 0 || !slices.Equal(rows, want) {
		t.Errorf("%d %q %q, want %q", code, rows, errs, want)
	}
	if out, _, _ := at(t, t.Context(), d, "status"); strings.Contains(out, "\nGPU ") {
		t.Errorf("without a GPU: %q", out)
	}
}
