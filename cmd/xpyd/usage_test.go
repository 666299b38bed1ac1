package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/xpyd/xpyd/internal/datadir"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kvconn"
)

// TestMain keeps the settings of whoever runs the tests out of them. It is also the
// program that `up` starts its workers of, and `bench` its other processes.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && slices.Contains([]string{"prefill", "decode", "bench"}, os.Args[1]) {
		main()
	}
	for _, kv := range os.Environ() {
		if name, _, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "XPYD_") {
			os.Unsetenv(name)
		}
	}
	os.Exit(m.Run())
}

// xpyd runs a command line in this process; it is stopped after a while.
func xpyd(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var out bytes.Buffer
	var errs shared // with children
	code = run(ctx, args, &out, &errs)
	if ctx.Err() != nil {
		t.Errorf("%v did not end by itself", args)
	}
	return out.String(), errs.String(), code
}

// shared is a buffer that several write to.
type shared struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *shared) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *shared) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// TestHelp: each command has help on standard output, with an example that
// names it and only flags that it has.
func TestHelp(t *testing.T) {
	root := newRoot(new(bytes.Buffer), new(bytes.Buffer))
	commands := [][]string{nil}
	for _, c := range root.Commands() {
		if c.Name() != "help" && c.Name() != "completion" {
			commands = append(commands, []string{c.Name()})
		}
	}
	if len(commands) < 10 {
		t.Fatalf("%d commands", len(commands))
	}
	for _, command := range commands {
		out, errs, code := xpyd(t, append(command, "--help")...)
		_, examples, ok := strings.Cut(out, "Examples:\n")
		if examples, _, _ = strings.Cut(examples, "\n\n"); code != exitDone || errs != "" || !ok {
			t.Errorf("%v --help: exit code %d, %q: no examples in\n%s", command, code, errs, out)
		}
		want := strings.Join(append([]string{"  xpyd"}, command...), " ")
		if !strings.Contains(examples, want) {
			t.Errorf("%v --help: no example with %q:\n%s", command, want, examples)
		}
		for line := range strings.Lines(examples) {
			c, rest, err := root.Find(strings.Fields(strings.TrimPrefix(strings.TrimSpace(line), "xpyd ")))
			if err != nil {
				continue // a comment or another program
			}
			for _, word := range rest {
				if name, ok := strings.CutPrefix(word, "--"); ok && c.Flags().Lookup(name) == nil && name != "help" {
					t.Errorf("%v --help: the example %q has an unknown flag %s", command, strings.TrimSpace(line), word)
				}
			}
		}
	}
}

// TestFlagsHelp: what stands between backquotes in a flag's usage is shown as the name
// of its value, so nothing does.
func TestFlagsHelp(t *testing.T) {
	seen := 0
	var look func(c *cobra.Command)
	look = func(c *cobra.Command) {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if seen++; strings.Contains(f.Usage, "`") {
				t.Errorf("%s --%s: %q has backquotes", c.CommandPath(), f.Name, f.Usage)
			}
		})
		for _, below := range c.Commands() {
			look(below)
		}
	}
	look(newRoot(new(bytes.Buffer), new(bytes.Buffer)))
	if seen < 50 {
		t.Errorf("%d flags", seen)
	}
}

// TestExitCodes: 0 done, 1 failed, 2 bad usage or configuration; a failure is
// one line on standard error.
func TestExitCodes(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	data := []string{"--data", filepath.Join(dir, "data"), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}
	nobody := []string{"--admin", "http://127.0.0.1:1", "--data", dir}
	f := func(want int, message string, args ...string) {
		t.Helper()
		_, errs, code := xpyd(t, args...)
		if code != want || !strings.Contains(errs, message) {
			t.Errorf("%v: exit code %d, want %d: %q lacks %q", args, code, want, errs, message)
		}
		if want != exitDone && (!strings.HasPrefix(errs, "xpyd: ") || strings.Count(errs, "\n") != 1) {
			t.Errorf("%v: not one line: %q", args, errs)
		}
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	taken := ln.Addr().String()
	notAModel := filepath.Join(dir, "model.gguf")
	if err := os.WriteFile(notAModel, []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}

	alone := alone(t)
	anyNATS := filepath.Join(dir, "nats.yaml")
	if err := os.WriteFile(anyNATS, []byte("fleet: {listen: \"127.0.0.1:0\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	noKeys := filepath.Join(dir, "router.yaml")
	if err := os.WriteFile(noKeys, []byte("fleet: {listen: \"127.0.0.1:0\"}\napi_keys_file: absent.yaml\n"), 0o600); err != nil {
		t.Fatal(err)
	}

	f(exitDone, "")
	f(exitDone, "", "version")
	f(exitDone, "", "--help")
	f(exitDone, "", "up", "--print-config")

	f(exitUsage, `unknown command "upp"`, "upp")
	f(exitUsage, "unknown flag: --lisen", "up", "--lisen", "x")
	f(exitUsage, `"many"`, "up", "--prefill", "many")
	f(exitUsage, "--prefill: 0 is not in 1..64", "up", "--prefill", "0")
	f(exitUsage, `--device: "tpu"`, "up", "--device", "tpu")
	f(exitUsage, `--log-level: "loud"`, "router", "--log-level", "loud")
	f(exitUsage, `--listen: "8000"`, "router", "--listen", "8000")
	f(exitUsage, "whom may this worker answer? --join-file FILE: ", "prefill")
	f(exitUsage, "; api_keys_file in --config: ", "decode")
	f(exitUsage, "; --trust-everyone: ", "decode", "--join-file", "")
	f(exitUsage, "--join-file: open "+filepath.Join(dir, "absent"), "prefill", "--join-file", filepath.Join(dir, "absent"))
	f(exitUsage, "it has no fleet secret", "prefill", "--join-file", notAModel)
	f(exitUsage, "nats url http://x: want nats://", "prefill", "--join-file", joinFileOf(t, "http://x"))
	f(exitUsage, "unknown flag: --join", "prefill", "--join", "nats://x")
	f(exitUsage, "", "up", "extra")
	f(exitUsage, "", "version", "extra")
	f(exitUsage, "", "drain")
	for _, value := range []string{"many", "1.5", ""} {
		f(exitUsage, `--decode: "`+value+`": want a whole number; see`, "up", "--decode", value)
	}
	f(exitUsage, `--wait: "x": want true or false`, "drain", "decode-0", "--wait=x")
	f(exitUsage, `--seed: "-1": want a whole number, 0 or more`, "plan", "--seed", "-1")
	f(exitUsage, `--share: "half": want a number`, "plan", "--share", "half")
	f(exitUsage, `--timeout: "3": want a duration such as "3s"`, "drain", "decode-0", "--timeout", "3")
	for _, args := range [][]string{{"drain", "decode-0"}, {"scale", "decode=2"}} {
		f(exitUsage, "--timeout -1s: want 0 or more", append(append(args, "--wait", "--timeout", "-1s"), nobody...)...)
	}
	f(exitUsage, "--upgrade: the path is empty", append([]string{"up", "--upgrade", ""}, nobody[2:]...)...)
	for _, long := range []string{"-5s", "0s", "999µs", "1h0m1s"} {
		f(exitUsage, "--upgrade-timeout "+long+": want 1ms to 1h0m0s", append([]string{"up", "--upgrade", taken, "--upgrade-timeout", long}, nobody[2:]...)...)
	}
	for id, why := range map[string]string{"": "the worker's ID is empty", "../scale": "want characters of", "a/b": "want characters of", "..": "misplaced dot", "a?b": "want characters of", "a%2fb": "want characters of"} {
		for _, args := range [][]string{{"drain", id}, {"undrain", id}, {"role", id, "decode"}, {"revoke", id}, {"unrevoke", id}, {"log-level", id, "info"}} {
			f(exitUsage, why, append(args, nobody...)...)
		}
	}
	asking := [][]string{{"status"}, {"drain", "decode-0"}, {"secret", "scrape-token"}}
	for _, args := range asking {
		f(exitUsage, "--data is empty", append(args, "--data", "")...)
	}
	for _, role := range []string{"up", "router"} {
		f(exitUsage, "--data: is empty", role, "--data", "")
	}
	f(exitUsage, `--kv-memory: "1PiB": want a size such as "64MiB", in B, kB, `, "up", "--kv-memory", "1PiB")
	f(exitUsage, `"both": want prefill or decode`, "role", "decode-0", "both")
	f(exitUsage, `"loud": want debug, info, warn or error`, "log-level", "decode-0", "loud")
	f(exitUsage, "", "role", "decode-0")
	f(exitUsage, "", "scale")
	f(exitUsage, "", "scale", "prefill=x")
	f(exitUsage, "", "scale", "cook=1")
	for _, n := range []string{"0", "-1", "65", "100000"} {
		f(exitUsage, `"decode=`+n+`": want 1 to 64 workers`, "scale", "prefill=1", "decode="+n)
	}
	f(exitUsage, `"prefill=2": prefill is there twice`, "scale", "prefill=1", "prefill=2")
	f(exitUsage, "no such file", "router", "--config", filepath.Join(dir, "absent.yaml"))
	f(exitUsage, noKeys+":2: api_keys_file: ", append([]string{"router", "--config", noKeys, "--log-level", "warn"}, data...)...)

	t.Run("env", func(t *testing.T) {
		t.Setenv("XPYD_DATA", "")
		f(exitUsage, "XPYD_DATA: data: is empty", "up")
		for _, args := range asking {
			f(exitUsage, "--data is empty, or XPYD_DATA", args...)
		}
	})

	f(exitFailed, "no router at http://127.0.0.1:1", append([]string{"status"}, nobody...)...)
	f(exitFailed, "no router at", append([]string{"drain", "x"}, nobody...)...)
	f(exitFailed, "no router at", append([]string{"scale", "prefill=1"}, nobody...)...)
	f(exitFailed, "address already in use", append([]string{"router", "--config", anyNATS, "--log-level", "warn", "--listen", taken}, data[:2]...)...)
	f(exitFailed, "address already in use", append([]string{"up", "--listen", taken}, data[:2]...)...)
	f(exitFailed, notAModel, append([]string{"prefill", "--model", notAModel}, alone...)...)
	f(exitFailed, "absent", append([]string{"decode", "--model", filepath.Join(dir, "absent")}, alone...)...)
	f(exitUsage, "--device: model stories260k: device cuda", append([]string{"prefill", "--device", "cuda"}, alone...)...)
}

// TestVersion: both ways print the same.
func TestVersion(t *testing.T) {
	command, _, _ := xpyd(t, "version")
	flag, _, code := xpyd(t, "--version")
	if code != exitDone || flag != command || !strings.HasPrefix(flag, "xpyd dev") || !strings.Contains(flag, ", KV protocol ") {
		t.Errorf("%d %q, %q", code, command, flag)
	}
	text, _, code := xpyd(t, "version", "--json")
	var said struct {
		Version, Go, Platform string
		Max                   int `json:"kv_protocol_max"`
	}
	if err := json.Unmarshal([]byte(text), &said); err != nil || code != exitDone || said.Version != "dev" || said.Go != runtime.Version() || said.Platform != runtime.GOOS+"/"+runtime.GOARCH || said.Max != kvconn.ProtocolMax {
		t.Errorf("%d %s, %v", code, text, err)
	}
	for _, c := range [][3]string{{"v1.2.3", "", "v1.2.3"}, {"v1.2.4-0.20260101000000-0123456789ab", "0123456789ab", "dev"}, {"(devel)", "", "dev"}, {"", "", "dev"}} {
		if got := ofModule(c[0], c[1]); got != c[2] {
			t.Errorf("%q: %q", c, got)
		}
	}
	want := `# HELP xpyd_build_info 1, with the build in its labels.
# TYPE xpyd_build_info gauge
xpyd_build_info{go="` + runtime.Version() + `",revision="` + revision() + `",version="dev"} 1
`
	if err := testutil.CollectAndCompare(buildInfo(), strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}

// joinFileOf is a join file that names NATS, or none.
func joinFileOf(t *testing.T, nats string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "join")
	line := trust.Join{URL: nats, Secrets: []trust.Secret{trust.NewSecret()}}
	if err := os.WriteFile(path, []byte(line.Reveal()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// alone are the flags of a worker that is in no fleet.
func alone(t *testing.T) []string { return []string{"--join-file", joinFileOf(t, "")} }

// TestSecondRouter: one data folder is one router's.
func TestSecondRouter(t *testing.T) {
	data, err := datadir.Own(filepath.Join(t.TempDir(), "data"))
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	_, errs, code := xpyd(t, "router", "--data", data.Path(), "--listen", "127.0.0.1:0", "--admin", "")
	if code != exitFailed || !strings.Contains(errs, fmt.Sprintf("another xpyd uses %s", data.Path())) {
		t.Errorf("%d %q", code, errs)
	}
}
