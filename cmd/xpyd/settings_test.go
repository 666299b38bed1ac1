package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/supervise"
)

// TestWorkersSettings: what this machine does not allow a worker is refused as bad
// configuration, with the key, and where that was set.
func TestWorkersSettings(t *testing.T) {
	dir := t.TempDir()
	taken := filepath.Join(dir, "file")
	if err := os.WriteFile(taken, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	up := []string{"--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data", filepath.Join(dir, "data"), "--device", "cpu"}
	alone := alone(t)
	for i, c := range []struct{ flags, yaml, want string }{
		{"--kv-host-memory 5TiB", "  host_memory: 5TiB", "iB"},
		{"--kv-host-memory 1KiB", "  host_memory: 1KiB", "1024 bytes of host memory: want room for"},
		{"--kv-host-memory 1MiB --kv-ssd-dir " + dir + " --kv-ssd-size 1KiB", "  host_memory: 1MiB\n  ssd_dir: " + dir + "\n  ssd_size: 1KiB", "want room for 8 units of 16 tokens at least"},
		{"--kv-host-memory 1MiB --kv-ssd-dir " + taken, "  host_memory: 1MiB\n  ssd_dir: " + taken, "not a directory"},
	} {
		lines := strings.Split(c.yaml, "\n")
		name, _, _ := strings.Cut(strings.TrimSpace(lines[len(lines)-1]), ":")
		flag := "--kv-" + strings.ReplaceAll(name, "_", "-")
		for _, role := range []string{"up", "decode"} {
			key, text := "kv."+name, "kv:\n"+c.yaml
			file := filepath.Join(dir, fmt.Sprint(role, i, ".yaml"))
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			at := fmt.Sprintf("%s:%d", file, 1+strings.Count(text, "\n"))
			for source, set := range map[string][]string{flag: strings.Fields(c.flags), at + ": " + key: {"--config", file}} {
				args := append([]string{role, "--log-level", "error"}, set...)
				if role == "up" {
					args = append(args, up...)
				} else {
					args = append(args, alone...)
				}
				_, errs, code := xpyd(t, args...)
				if code != exitUsage || !strings.HasPrefix(errs, "xpyd: "+source+": ") || strings.HasPrefix(errs, "xpyd: "+source+": "+key) || !strings.Contains(errs, c.want) || strings.Count(errs, "\n") != 1 {
					t.Errorf("%v: exit code %d, %q lacks %s or %q, or names the key twice", args, code, errs, source, c.want)
				}
			}
		}
	}
}

// TestSocketsFolder: a folder for sockets that others could write to, or that is none, is refused
// with its key.
func TestSocketsFolder(t *testing.T) {
	dir := t.TempDir()
	open := filepath.Join(dir, "open")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	alone := alone(t)
	for _, folder := range []string{open, filepath.Join(dir, "none")} {
		file := filepath.Join(dir, "decode.yaml")
		if err := os.WriteFile(file, []byte("kv:\n  sockets: "+folder), 0o600); err != nil {
			t.Fatal(err)
		}
		_, errs, code := xpyd(t, append([]string{"decode", "--log-level", "error", "--config", file}, alone...)...)
		if code != exitUsage || !strings.HasPrefix(errs, "xpyd: "+file+":2: kv.sockets: ") || !strings.Contains(errs, folder) {
			t.Errorf("%s: exit code %d, %q", folder, code, errs)
		}
	}
}

// TestPoolLargerThanMachine: a pool on the CPU is taken at start, so one that the machine
// has no memory for is refused then, with the numbers, and not when requests fill it.
func TestPoolLargerThanMachine(t *testing.T) {
	const row = `: the KV pool: \d+ MiB wanted, and 512 MiB to spare for others, where \d+ MiB are to be had\n$`
	_, errs, code := xpyd(t, "decode", "--device", "cpu", "--log-level", "error", "--blocks", "1000000000", "--join-file", joinFileOf(t, ""))
	if ok, _ := regexp.MatchString("^xpyd: --blocks"+row, errs); code != exitUsage || !ok {
		t.Errorf("exit code %d, %q", code, errs)
	}
}

// TestStartError: only a worker that says that its configuration is bad has said which.
func TestStartError(t *testing.T) {
	for _, c := range []struct {
		code       int
		line, want string
		bad        bool
	}{
		{2, "xpyd: --kv-ssd-dir: mkdir /a/kv.d: no", "kv.ssd_dir: decode-0: mkdir /a/kv.d: no", true},
		{2, "xpyd: --nats: fleet.url: is bad", "fleet.url: decode-0: is bad", true},
		{2, "xpyd: --device: cuda: none", "device: decode-0: cuda: none", true},
		{2, "xpyd: XPYD_KV__STORE: kv.store: is bad", "kv.store: decode-0: is bad", true},
		{2, "xpyd: kv_memory: holds nothing", "kv_memory: decode-0: holds nothing", true},
		{2, "xpyd: unknown flag: --x; see help", "decode-0: unknown flag: --x; see help", false},
		{1, "xpyd: tier: --x: no", "decode-0: tier: --x: no", false},
		{1, "", "decode-0: exit status 1 before it was ready", false},
	} {
		err := startError(&supervise.Status{Name: "decode-0", LastLine: c.line, Exit: &supervise.Exit{Code: c.code}})
		if _, bad := wrongSetting(nil, err).(usageError); bad != c.bad || err.Error() != c.want {
			t.Errorf("%q, exit %d: %v, bad %t", c.line, c.code, err, bad)
		}
	}
}

// TestWorkerStopped: a worker that is stopped while it starts has no bad configuration.
func TestWorkerStopped(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out, errs bytes.Buffer
	if code := run(ctx, append([]string{"decode", "--device", "cpu", "--kv-host-memory", "1MiB"}, alone(t)...), &out, &errs); code != exitDone {
		t.Errorf("exit code %d, %q", code, errs.String())
	}
}

// TestScaleOfRouter: a router without `up` says that it starts no workers and is not upgraded in place,
// and what to do.
func TestScaleOfRouter(t *testing.T) {
	data := filepath.Join(t.TempDir(), "data")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	up := &upTo{text: "join with", then: func() {
		for advice, args := range map[string][]string{
			"xpyd prefill --join-file": {"scale", "prefill=2", "--data", data},
			"start the other binary":   {"up", "--upgrade", os.Args[0], "--data", data},
		} {
			_, errs, code := xpyd(t, args...)
			if code != exitFailed || !strings.Contains(errs, "was not started by `xpyd up`") || !strings.Contains(errs, advice) {
				t.Errorf("%v: exit code %d, %q", args, code, errs)
			}
		}
		cancel()
	}}
	var log bytes.Buffer
	if code := run(ctx, []string{"router", "--data", data, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}, up, &log); code != exitDone || !up.found {
		t.Fatalf("exit code %d, %s", code, log.String())
	}
}

// upTo calls then once text was written.
type upTo struct {
	text  string
	then  func()
	all   string
	found bool
}

func (u *upTo) Write(p []byte) (int, error) {
	if u.all += string(p); strings.Contains(u.all, u.text) {
		u.found = true
		u.then()
	}
	return len(p), nil
}

// TestLongUnits: blocks that do not go with the cache's units are warned of.
func TestLongUnits(t *testing.T) {
	for tokens, unit := range map[int]string{1: "", 8: "", 12: "48", 16: "", 17: "272", 48: ""} { // what ends it is the host memory
		_, errs, _ := xpyd(t, append([]string{"decode", "--device", "cpu", "--log-level", "warn", "--block-tokens", fmt.Sprint(tokens), "--kv-host-memory", "1KiB"}, alone(t)...)...)
		want := fmt.Sprintf("blocks of %d tokens: only whole units of %s are cached; take 16 or a multiple", tokens, unit)
		if warned := strings.Contains(errs, "level=WARN"); warned != (unit != "") || warned && !strings.Contains(errs, want) {
			t.Errorf("blocks of %d: %q", tokens, errs)
		}
	}
}
