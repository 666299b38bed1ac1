package kvbench_test

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/kvbench"
	"github.com/xpyd/xpyd/kvconn/shm"
	"github.com/xpyd/xpyd/kvconn/tcp"
)

func small() kvbench.Config {
	c := kvbench.DefaultConfig()
	c.Transport, c.Bytes, c.BlockBytes, c.Layers = "tcp", 1<<20, 4<<10, 4
	c.LatencyBytes, c.LatencyRuns, c.Handshakes, c.Repetitions, c.Warmup = 16<<10, 20, 2, 2, 1
	return c
}

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

func transports(t *testing.T) map[string]kvbench.Transport {
	t.Helper()
	all := map[string]kvbench.Transport{"tcp": {Transport: tcp.New(nil)}}
	if mem, err := shm.New(""); err == nil {
		all["shm"] = kvbench.Transport{Transport: mem, Local: true}
	} else if !errors.Is(err, shm.ErrUnsupported) {
		t.Fatal(err)
	}
	return all
}

// serve runs a sender in this process until the test is over.
func serve(t *testing.T, once bool) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- kvbench.Serve(ctx, ln, transports(t), quiet(), once) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return ln.Addr().String()
}

func run(t *testing.T, c kvbench.Config, addr string) *kvbench.Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	r, err := kvbench.Run(ctx, c, kvbench.Peer{Addr: addr, Transports: transports(t), Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func names(r *kvbench.Report) (out []string) {
	for _, s := range r.Runs {
		out = append(out, s.Name)
	}
	return out
}

// A whole run: every kind takes its turns, every byte is compared, and the
// sender serves the next one.
func TestRun(t *testing.T) {
	addr := serve(t, false)
	c := small()
	c.Digests, c.Connections, c.Concurrency, c.Sweep = "both", 2, 2, []int{16 << 10, 1 << 20}
	r := run(t, c, addr)
	want := []string{kvbench.RunChecked, kvbench.RunUnchecked, kvbench.RunBare, kvbench.RunMemcpy, kvbench.RunScattered}
	if !slices.Equal(names(r), want) {
		t.Errorf("runs %v, notes %v", names(r), r.Notes)
	}
	for _, s := range r.Runs {
		if len(s.All) != c.Repetitions || s.GBs.Min <= 0 || s.GBs.Median < s.GBs.Min || s.GBs.Max < s.GBs.Median {
			t.Errorf("%s: %+v", s.Name, s)
		}
	}
	if l := r.Latency; l.Runs != c.LatencyRuns || l.P50 <= 0 || l.P99 < l.P50 || l.Max < l.P99 {
		t.Errorf("latency %+v", l)
	}
	if h := r.Handshake; h == nil || h.FirstByte.Min <= 0 || h.FirstByte.Median < h.Open.Min {
		t.Errorf("handshake %+v", h)
	}
	if !r.Verified || r.Transport != "tcp" || len(r.Sweep) != 2 {
		t.Errorf("%+v", r)
	}

	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var back kvbench.Report
	if err := json.Unmarshal(raw, &back); err != nil || !slices.Equal(names(&back), want) || back.Config.Bytes != c.Bytes {
		t.Errorf("%v: %s", err, raw)
	}
	var table, svg, page bytes.Buffer
	if err := r.Table(&table); err != nil || !strings.Contains(table.String(), "1 MiB as 256 blocks of 4 KiB") || !strings.Contains(table.String(), "equal") {
		t.Errorf("%v\n%s", err, &table)
	}
	if err := r.Plot(&svg); err != nil || xml.Unmarshal(svg.Bytes(), new(any)) != nil || strings.Contains(svg.String(), "NaN") {
		t.Errorf("%v\n%s", err, &svg)
	}
	if err := r.PlotHTML(&page); err != nil || !strings.Contains(page.String(), "<svg") || strings.Contains(page.String(), "src=") {
		t.Errorf("%v\n%s", err, &page)
	}

	c = small()
	c.Scatter, c.Baselines, c.LatencyRuns, c.Handshakes, c.Digests, c.Transport = "contiguous", false, 0, 0, "off", "auto"
	if r = run(t, c, addr); !slices.Equal(names(r), []string{kvbench.RunUnchecked}) || r.Handshake != nil || r.Why == "" || !r.Verified {
		t.Errorf("%+v", r)
	}
	if _, ok := transports(t)["shm"]; ok != (r.Transport == "shm") || ok != r.Mapped {
		t.Errorf("auto chose %s (%s)", r.Transport, r.Why)
	}
}

// What cannot be is said before anything is measured.
func TestRunErrors(t *testing.T) {
	known := transports(t)
	f := func(c kvbench.Config, addr, want string) {
		t.Helper()
		_, err := kvbench.Run(t.Context(), c, kvbench.Peer{Addr: addr, Transports: known, Log: quiet()})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("have %v, want %q", err, want)
		}
	}
	c := small()
	f(c, "127.0.0.1:1", "no sender at 127.0.0.1:1")
	delete(known, "shm")
	c.Transport = "shm"
	f(c, serve(t, false), `no transport "shm"`)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := kvbench.Run(ctx, small(), kvbench.Peer{Addr: serve(t, false), Transports: transports(t), Log: quiet()}); err == nil {
		t.Error("ran although it was over before it began")
	}
}

// A sender answers nonsense with an error, and ends with its receiver when it
// serves once.
func TestServe(t *testing.T) {
	f := func(line, want string) {
		t.Helper()
		c, err := net.Dial("tcp", serve(t, true))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		if _, err := io.WriteString(c, line+"\n"); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 4096)
		n, _ := c.Read(buf)
		if !strings.Contains(string(buf[:n]), want) {
			t.Errorf("%s: have %s", line, buf[:n])
		}
	}
	f(`{"ask":"cpu"}`, `{}`[:1])
	f(`{"ask":"bare","connections":4}`, "cannot")
	f(`{"ask":"dance"}`, `cannot \"dance\" now`)
	f(`{"ask":"start","config":{"transport":"tcp"}}`, "layers: 0 is not in 1..1024")
	good, err := json.Marshal(small())
	if err != nil {
		t.Fatal(err)
	}
	f(`{"ask":"start","transport":"pigeon","config":`+string(good)+`}`, `no transport`)
}

func TestValidate(t *testing.T) {
	if err := kvbench.DefaultConfig().Validate(); err != nil {
		t.Error(err)
	}
	f := func(want string, change func(*kvbench.Config)) {
		t.Helper()
		c := kvbench.DefaultConfig()
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("have %v, want %q", err, want)
		}
	}
	f(`transport: "rdma" is not one of tcp, shm, auto`, func(c *kvbench.Config) { c.Transport = "rdma" })
	f("scatter", func(c *kvbench.Config) { c.Scatter = "odd" })
	f("digests", func(c *kvbench.Config) { c.Digests = "" })
	f("layers: 0 is not in 1..1024", func(c *kvbench.Config) { c.Layers = 0 })
	f("kv-heads", func(c *kvbench.Config) { c.KVHeads = 1 << 20 })
	f("connections: 65", func(c *kvbench.Config) { c.Connections = 65 })
	f("duration", func(c *kvbench.Config) { c.Duration = -1 })
	f("whole number of bytes for each of 2 (K,V) x 3 heads", func(c *kvbench.Config) { c.KVHeads = 3 })
	f("102401 KiB is not a multiple of 256 KiB", func(c *kvbench.Config) { c.Bytes = 100<<20 + 1<<10 })
	f("over 64 GiB in all", func(c *kvbench.Config) { c.Bytes, c.Concurrency = 1<<30, 128 })
	f("size", func(c *kvbench.Config) { c.Sweep = []int{1} })
	f("size", func(c *kvbench.Config) { c.LatencyBytes = 1 << 10 })
}

func TestSize(t *testing.T) {
	f := func(text string, want int) {
		t.Helper()
		if n, err := kvbench.ParseSize(text); err != nil || n != want {
			t.Errorf("%q: %d %v", text, n, err)
		}
	}
	f("1", 1)
	f("16384B", 16384)
	f("16k", 16384)
	f("16 KiB", 16384)
	f("256MiB", 256<<20)
	f("2g", 2<<30)
	for _, bad := range []string{"", "-1", "0", "KiB", "1.5MiB", "16KK", "99999999GiB", "1TiB"} {
		if n, err := kvbench.ParseSize(bad); err == nil {
			t.Errorf("%q: %d", bad, n)
		}
	}
	for n, want := range map[int]string{1: "1 B", 16 << 10: "16 KiB", 1536: "1536 B", 256 << 20: "256 MiB", 3 << 30: "3 GiB"} {
		if have := kvbench.Size(n); have != want {
			t.Errorf("%d: %s", n, have)
		}
	}
}

// FuzzConfig: whatever a receiver asks for is refused or fits the bounds.
func FuzzConfig(f *testing.F) {
	good, err := json.Marshal(kvbench.DefaultConfig())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"bytes":-9223372036854775808,"layers":1024,"block_bytes":1}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var c kvbench.Config
		if json.Unmarshal(raw, &c) != nil || c.Validate() != nil {
			return
		}
		if c.Bytes < 1 || c.Bytes*c.Concurrency > 64<<30 || c.Layers*c.BlockBytes > c.Bytes || c.BlockBytes%(2*c.KVHeads*c.BlockTokens) != 0 {
			t.Fatalf("%+v", c)
		}
	})
}
