package config_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/xpyd/xpyd/internal/config"
)

type limits struct {
	MaxBody int64         `key:"max_body" unit:"bytes"`
	Queue   int           `key:"queue"`
	Rate    float64       `key:"rate"`
	Timeout time.Duration `key:"timeout"`
}

func (l *limits) Validate() error {
	if l.Queue < 0 {
		return &config.KeyError{Key: "queue", Msg: "must not be negative"}
	}
	return nil
}

type member struct {
	ID     string `key:"id"`
	URL    string `key:"url"`
	Weight uint8  `key:"weight"`
}

func (m member) Validate() error {
	if m.ID == "" {
		return foreignKeyError{"id"}
	}
	return nil
}

// foreignKeyError is what a package that cannot import config returns.
type foreignKeyError struct{ key string }

func (e foreignKeyError) Error() string     { return "is needed" }
func (e foreignKeyError) ConfigKey() string { return e.key }

type Common struct {
	Level slog.Level `key:"log_level"`
}

type router struct {
	Common
	Listen  string            `key:"listen"`
	Token   string            `key:"token" secret:"true"`
	NATS    string            `key:"nats" secret:"url"`
	Debug   bool              `key:"debug"`
	Cache   config.Size       `key:"cache"`
	Limits  limits            `key:"limits"`
	Backup  *limits           `key:"backup"`
	Addr    netip.Addr        `key:"addr"`
	Hosts   []string          `key:"hosts"`
	Members []member          `key:"members"`
	Pools   map[string]member `key:"pools"`
	Weights map[string]int    `key:"weights"`
	Log     *slog.Logger      `key:"-"`
	Hidden  func()
}

func (r *router) Validate() error {
	if r.Listen == "" {
		return errors.Join(&config.KeyError{Key: "listen", Msg: "must not be empty"}, errors.New("nothing to do"))
	}
	return nil
}

func defaults() *router {
	return &router{
		Listen: "127.0.0.1:8000", Cache: 64 << 20, Token: "t0p", Addr: netip.MustParseAddr("::1"),
		Limits: limits{MaxBody: 1 << 20, Queue: 5, Rate: 1.5, Timeout: 3 * time.Second},
		Hosts:  []string{"a", "b"}, Weights: map[string]int{"x": 1},
		Log: slog.New(slog.DiscardHandler),
	}
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "router.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestPrecedence(t *testing.T) {
	flags := pflag.NewFlagSet("router", pflag.ContinueOnError)
	flags.String("listen", "flag default", "")
	flags.Int("queue", 1, "")
	flags.StringSlice("hosts", nil, "")
	flags.String("other", "", "")
	if err := flags.Parse([]string{"--queue=9", "--other=x", "--hosts=h,i"}); err != nil {
		t.Fatal(err)
	}
	c := defaults()
	err := config.Load(c, config.Options{
		File: write(t, `
listen: file:1
debug: true
log_level: warn
cache: 1.5GiB
limits: {queue: 7, timeout: 250ms, max_body: 2MiB}
backup: &b {queue: 3}
hosts: [f]
members:
  - {id: m0, weight: 3}
  - id: m1
pools:
  llama-3.1: {id: p}
weights: {y: 2}
token:
`),
		Environ: []string{"XPYD_LIMITS_QUEUE=8", "XPYD_LIMITS__RATE=2", "XPYD_LOG_LEVEL=ERROR", "HOME=/", "XPYD_ADMIN_TOKEN=x",
			"XPYD_HOSTS=e1, e2", "XPYD_PREFILL_X=1", "XPYD_WEIGHTS={z: 3}", "XPYD_NATS=nats://u:p@h"},
		EnvAllow: []string{"XPYD_PREFILL_*"},
		Flags:    flags,
		FlagKeys: map[string]string{"listen": "listen", "queue": "limits.queue", "hosts": "hosts"},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := defaults()
	want.Log = c.Log
	want.Listen, want.Debug, want.Level, want.Cache = "file:1", true, slog.LevelError, 3<<29
	want.Limits = limits{MaxBody: 2 << 20, Queue: 9, Rate: 2, Timeout: 250 * time.Millisecond}
	want.Backup = &limits{Queue: 3}
	want.Hosts = []string{"h", "i"}
	want.Members = []member{{ID: "m0", Weight: 3}, {ID: "m1"}}
	want.Pools = map[string]member{"llama-3.1": {ID: "p"}}
	want.Weights = map[string]int{"x": 1, "y": 2, "z": 3}
	want.NATS = "nats://u:p@h"
	if !reflect.DeepEqual(c, want) {
		t.Fatalf("got\n%+v\nwant\n%+v", c, want)
	}
}

// TestServiceLinks: what Kubernetes sets for services called xpyd and xpyd-decode
// is no configuration, unless a key has that name.
func TestServiceLinks(t *testing.T) {
	var c struct {
		ServiceHost string `key:"service_host"`
		Port        string `key:"port"`
	}
	environ := []string{"XPYD_SERVICE_HOST=10.0.0.1", "XPYD_PORT=tcp://10.0.0.1:8000"}
	if err := config.Load(&c, config.Options{Environ: environ}); err != nil || c.ServiceHost != "10.0.0.1" || c.Port != "tcp://10.0.0.1:8000" {
		t.Errorf("%+v, %v", c, err)
	}
	for _, of := range []string{"XPYD", "XPYD_DECODE"} {
		environ = append(environ, of+"_SERVICE_HOST=10.0.0.1", of+"_SERVICE_PORT=8000", of+"_SERVICE_PORT_HTTP_ADMIN=8001", of+"_PORT=udp://10.0.0.1:8000",
			of+"_PORT_8000_TCP=tcp://10.0.0.1:8000", of+"_PORT_8000_TCP_PROTO=tcp", of+"_PORT_8000_TCP_PORT=8000", of+"_PORT_8000_TCP_ADDR=10.0.0.1")
	}
	d := defaults()
	if err := config.Load(d, config.Options{Environ: environ[2:]}); err != nil {
		t.Error(err)
	}
}

func TestNothingGiven(t *testing.T) {
	c := defaults()
	if err := config.Load(c, config.Options{}); err != nil {
		t.Fatal(err)
	}
	if want := defaults(); c.Limits != want.Limits || c.Addr != want.Addr || c.Weights["x"] != 1 {
		t.Fatalf("%+v", c)
	}
}

// TestInvalid has one case a line: file, environment, message. F is the
// file's path.
func TestInvalid(t *testing.T) {
	f := func(file string, want ...string) {
		t.Helper()
		var environ []string
		if text, env, ok := strings.Cut(file, "|"); ok {
			file, environ = text, strings.Split(env, "|")
		}
		path := write(t, file)
		c := defaults()
		err := config.Load(c, config.Options{File: path, Environ: environ})
		if err == nil {
			t.Errorf("%q is accepted", file)
			return
		}
		got := strings.ReplaceAll(err.Error(), path, "F")
		if got != strings.Join(want, "\n") {
			t.Errorf("%q: got\n%s\nwant\n%s", file, got, strings.Join(want, "\n"))
		}
		if d := defaults(); c.Listen != d.Listen || c.Limits != d.Limits {
			t.Errorf("%q: dst was changed", file)
		}
	}
	f("\nlistn: x\n", `F:2: listn: unknown key (did you mean "listen"?)`)
	f("limits:\n  queue: 1\n  maxbody: 3\n", `F:3: limits.maxbody: unknown key (did you mean "max_body"?)`)
	f("limits:\n  zzz: 3\n", `F:2: limits.zzz: unknown key`)
	f("hidden: 1", `F:1: hidden: unknown key`)
	f("a: 1\ndebug: yes\n", `F:1: a: unknown key`, `F:2: debug: "yes": want true or false`)
	f("limits: {timeout: 3}", `F:1: limits.timeout: "3": want a duration such as "3s" or "250ms"`)
	f("limits: {max_body: 64M}", `F:1: limits.max_body: "64M": want a size such as "64MiB", in B, kB, MB, GB, TB, KiB, MiB, GiB or TiB`)
	f("limits: {max_body: 9000000TiB}", `F:1: limits.max_body: "9000000TiB": want less than 8388608TiB`)
	f("limits: {max_body: 9000000.5TiB}", `F:1: limits.max_body: "9000000.5TiB": want less than 8388608TiB`)
	f("limits: {queue: many}", `F:1: limits.queue: "many": want a whole number`)
	f("limits: {queue: 1.5}", `F:1: limits.queue: "1.5": want a whole number`)
	f("limits: {rate: .nan}", `F:1: limits.rate: ".nan": want a number`)
	f("\n\nlisten: a: b", `F:3: mapping values are not allowed in this context`)
	f("listen: *b", `F: unknown anchor 'b' referenced`)
	f("|XPYD_PORT=8000", `XPYD_PORT: unknown variable (did you mean "XPYD_HOSTS"?)`)
	f("|XPYD_SERVICE_HOSTS=x|XPYD_PORT_TCP=tcp://a:1", `XPYD_PORT_TCP: unknown variable`, `XPYD_SERVICE_HOSTS: unknown variable`)
	f("limits: 3", `F:1: limits: want a section of keys`)
	f("limits: [3]", `F:1: limits: want a section of keys`)
	f("listen: [3]", `F:1: listen: want one value`)
	f("hosts: a", `F:1: hosts: want a list`)
	f("hosts: [a, ]\nmembers:\n- id: a\n-\n", `F:4: members[1]: is empty`)
	f("listen: a\nlisten: b", `F:2: listen: set twice, first in line 1`)
	f("log_level: loud", `F:1: log_level: "loud": slog: level string "loud": unknown name`)
	f("members: [{id: a, weight: 256}]", `F:1: members[0].weight: "256": 256 does not fit`)
	f("members: [{id: a, weight: -1}]", `F:1: members[0].weight: "-1": -1 does not fit`)
	f("token: [secret]", `F:1: token: want one value`)
	f("a: b: c", `F:1: mapping values are not allowed in this context`)
	f("listen: a\n\tx", `F:2: found a tab character that violates indentation`)
	f("listen: a\n---\nlisten: b", `F:2: a second document`)
	f("- a", `F:1: want a section of keys`)
	f("? [a]\n: b", `F:1: want a plain key`)
	// Validate
	f("limits:\n\n  queue: -1", `F:3: limits.queue: must not be negative`)
	f("backup: {queue: -1}", `F:1: backup.queue: must not be negative`)
	f("listen: ''", `F:1: listen: must not be empty`, `nothing to do`)
	f("members:\n- id: a\n- url: b", `F:3: members[1].id: is needed`)
	f("pools:\n  x: {url: b}", `F:2: pools.x.id: is needed`)
	// environment
	f("|XPYD_LISTN=x", `XPYD_LISTN: unknown variable (did you mean "XPYD_LISTEN"?)`)
	f("|XPYD_LIMITS_QUEUE=x", `XPYD_LIMITS_QUEUE: limits.queue: "x": want a whole number`)
	f("limits: {queue: 3}|XPYD_LIMITS__QUEUE=-3", `XPYD_LIMITS__QUEUE: limits.queue: must not be negative`)
	f("|XPYD_LIMITS__QUEUE=1|XPYD_LIMITS_QUEUE=2", `XPYD_LIMITS__QUEUE: limits.queue: also set as XPYD_LIMITS_QUEUE`)
	f("|XPYD_WEIGHTS=a", `XPYD_WEIGHTS: weights: want a section of keys`)
	f("|XPYD_WEIGHTS={a", `XPYD_WEIGHTS: weights: is not YAML: yaml: line 1: did not find expected ',' or '}'`)
	f("members: [{id: a}]|XPYD_MEMBERS=[{url: a}]", `XPYD_MEMBERS: members[0].id: is needed`)
}

func TestFlagErrors(t *testing.T) {
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	flags.String("queue", "", "")
	flags.String("gone", "", "")
	if err := flags.Parse([]string{"--queue=x", "--gone=1"}); err != nil {
		t.Fatal(err)
	}
	err := config.Load(defaults(), config.Options{Flags: flags, FlagKeys: map[string]string{"queue": "limits.queue", "gone": "gone"}})
	want := "--gone: no such key\n--queue: limits.queue: \"x\": want a whole number"
	if err == nil || err.Error() != want {
		t.Fatalf("got %v\nwant %s", err, want)
	}
}

func TestOddInputs(t *testing.T) {
	if config.Load(router{}, config.Options{}) == nil || config.Load(nil, config.Options{}) == nil {
		t.Error("a value is no destination")
	}
	if err := config.Load(defaults(), config.Options{File: filepath.Join(t.TempDir(), "x")}); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if err := config.Load(defaults(), config.Options{File: write(t, strings.Repeat("#", 5<<20))}); err == nil {
		t.Error("a huge file is read")
	}
	bomb := "hosts: &a [x,x,x,x,x,x,x,x,x,x]\nmembers: *a\n"
	if config.Load(defaults(), config.Options{File: write(t, bomb)}) == nil {
		t.Error("strings as members")
	}
}

func TestPrint(t *testing.T) {
	c := defaults()
	c.NATS = "nats://u:hunter2@h:1,nats://v:hunter3@i:1"
	c.Pools = map[string]member{"b": {ID: "true"}, "a": {ID: "1"}}
	c.Members = []member{{ID: "m", URL: "http://x"}}
	var out bytes.Buffer
	if err := config.Print(&out, c); err != nil {
		t.Fatal(err)
	}
	want := `log_level: INFO
listen: 127.0.0.1:8000
token: '********'
nats: nats://u:********@h:1,nats://v:********@i:1
debug: false
cache: 64MiB
limits:
  max_body: 1MiB
  queue: 5
  rate: 1.5
  timeout: 3s
backup: null
addr: ::1
hosts:
  - a
  - b
members:
  - id: m
    url: http://x
    weight: 0
pools:
  a:
    id: "1"
    url: ""
    weight: 0
  b:
    id: "true"
    url: ""
    weight: 0
weights:
  x: 1
`
	if got := out.String(); got != want {
		t.Fatalf("got\n%s\nwant\n%s", got, want)
	}
	again := defaults()
	if err := config.Load(again, config.Options{File: write(t, out.String())}); err != nil {
		t.Fatal(err)
	}
	again.NATS, again.Token, again.Log = c.NATS, c.Token, c.Log
	if !reflect.DeepEqual(again, c) {
		t.Fatalf("got\n%+v\nwant\n%+v", again, c)
	}
}

func TestSize(t *testing.T) {
	for text, want := range map[string]config.Size{
		"0": 0, "12": 12, "12B": 12, "64MiB": 64 << 20, "64 MiB": 64 << 20, "1.5GiB": 3 << 29, "1kB": 1000, "1KB": 1000, "2TB": 2e12,
	} {
		if got, err := config.ParseSize(text); err != nil || got != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "B", "-1", "1M", "x", "1e3", "0.3B", "9999999999TiB", "1.2.3GiB", "NaN", "+1"} {
		if got, err := config.ParseSize(text); err == nil {
			t.Errorf("%q is %v", text, got)
		}
	}
}

func TestPoolSize(t *testing.T) {
	for text, want := range map[string]int64{"0": 0, "64MiB": 64 << 20, "2x": 2000, "0.5x": 500, "1.25x": 1250, "0.001x": 1, "1000x": 1e6} {
		var s, again config.PoolSize
		if err := s.UnmarshalText([]byte(text)); err != nil || s.Of(1000) != want {
			t.Errorf("%q: %d, %v", text, s.Of(1000), err)
		}
		if err := again.UnmarshalText([]byte(s.String())); err != nil || again != s {
			t.Errorf("%q is written as %q: %v", text, s, err)
		}
	}
	for _, text := range []string{"", "x", "-1x", "0x", "0.0001x", "1001x", "NaNx", "2xx", "2y", "-1"} {
		var s config.PoolSize
		if err := s.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is %v", text, s)
		}
	}
}

func FuzzSize(f *testing.F) {
	f.Add("64MiB")
	f.Add("1.5 GB")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := config.ParseSize(text)
		if err != nil {
			return
		}
		if again, err := config.ParseSize(s.String()); err != nil || again != s || s < 0 {
			t.Fatalf("%q is %d, then %d, %v", text, s, again, err)
		}
	})
}

// FuzzFile: no file makes Load panic, and what it accepts, Print writes so
// that Load accepts it again as the same.
func FuzzFile(f *testing.F) {
	f.Add("listen: a\nlimits: {queue: 1}\nmembers: [{id: a}]\npools: {x.y: {id: z}}")
	f.Add("a: &x [*x]")
	f.Add("<<: {listen: a}")
	f.Fuzz(func(t *testing.T, text string) {
		path := filepath.Join(t.TempDir(), "f.yaml")
		load := func(text string) (*router, error) {
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			c := &router{Listen: "x", Addr: netip.IPv6Loopback()}
			return c, config.Load(c, config.Options{File: path})
		}
		c, err := load(text)
		if err != nil {
			return
		}
		c.Token, c.NATS = "", ""
		var out bytes.Buffer
		if err := config.Print(&out, c); err != nil {
			t.Fatal(err)
		}
		again, err := load(out.String())
		if err != nil {
			t.Fatalf("%v\n%s", err, out.String())
		}
		if a, b := fmt.Sprintf("%#v", c.Limits), fmt.Sprintf("%#v", again.Limits); a != b || c.Listen != again.Listen {
			t.Fatalf("%s then %s", a, b)
		}
	})
}

func TestReloader(t *testing.T) {
	first, next := defaults(), defaults()
	var loadErr, applyErr error
	applied := make(chan *router, 1000)
	r := config.NewReloader(first,
		func() (*router, error) { return next, loadErr },
		func(old, new *router) error {
			if applyErr == nil {
				applied <- new
			}
			return applyErr
		}, nil)
	loadErr = errors.New("bad file")
	if err := r.Reload(); err == nil || !strings.Contains(err.Error(), "old configuration stays") || r.Current() != first {
		t.Fatal(err)
	}
	loadErr, applyErr = nil, errors.New("listen cannot change")
	if err := r.Reload(); !errors.Is(err, applyErr) || r.Current() != first {
		t.Fatal(err)
	}
	applyErr = nil
	// Signals that come before Run listens must not end the test.
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGHUP)
	defer signal.Stop(caught)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { r.Run(ctx) })
	defer wg.Wait()
	defer cancel()
	for {
		if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		select {
		case got := <-applied:
			if got != next {
				t.Fatal("applied something else")
			}
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// TestSources: what shows to be wrong after Load is located as what Load refuses.
func TestSources(t *testing.T) {
	path, sources := write(t, "limits:\n  queue: 3\n"), config.Sources{}
	if err := config.Load(defaults(), config.Options{File: path, Sources: sources}); err != nil {
		t.Fatal(err)
	}
	wrong := &config.KeyError{Key: "limits.queue", Msg: "too many"}
	for want, err := range map[string]error{
		path + ":2: limits.queue: too many": fmt.Errorf("start: %w", wrong),
		"listen: taken":                     &config.KeyError{Key: "listen", Msg: "taken"},
		"no key":                            errors.New("no key"),
	} {
		if got := sources.Locate(err).Error(); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

func TestRedact(t *testing.T) {
	f := func(text, want string) {
		t.Helper()
		if got := config.Redact(text); got != want {
			t.Errorf("%s: have %s, want %s", text, got, want)
		}
	}
	f("", "")
	f("nats://h:4222,i:4222", "nats://h:4222,i:4222")
	f("nats://token@h:4222", "nats://********@h:4222")
	f("token@h", "********@h")
	f("u:p@h", "u:********@h")
	f("nats://u:p@ss@h:4222", "nats://u:********@h:4222")
	f("nats://u:p/s:s@h", "nats://u:********@h")
	f("redis://:p,a@h/0", "redis://:********@h/0")
	f("nats://u:p@h:1,nats://token@i:1, tls://v:q@j", "nats://u:********@h:1,nats://********@i:1, tls://v:********@j")
	f("nats://u:p@h:1,i:1", "nats://u:********@h:1,i:1")
	f("nats://h:1,u:p@i:1", "nats://h:********@i:1") // or a password with a comma
}
