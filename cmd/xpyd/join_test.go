package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/internal/datadir"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/worker"
)

func writeJoin(t *testing.T, path string, mode os.FileMode, url string, secrets ...trust.Secret) {
	t.Helper()
	line := trust.Join{URL: url, Secrets: secrets}
	if err := errors.Join(os.WriteFile(path+".new", []byte(line.Reveal()+"\n"), mode), os.Chmod(path+".new", mode), os.Rename(path+".new", path)); err != nil {
		t.Fatal(err)
	}
}

// TestFollow: what a join file says is in force when it changes, and what it does
// not say changes nothing and is logged once.
func TestFollow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "join")
		one, two := trust.NewSecret(), trust.NewSecret()
		writeJoin(t, path, 0o600, "nats://127.0.0.1:1", one)
		j, err := readJoining(t.Context(), "", path)
		if err != nil || !j.given() || j.open {
			t.Fatal(j.open, err)
		}
		var log bytes.Buffer
		look := make(chan os.Signal)
		applied := make(chan trust.Join, 10)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			j.follow(ctx, look, slog.New(slog.NewTextHandler(&log, nil)), func(next trust.Join) error {
				applied <- next
				if strings.HasSuffix(next.URL, ":9") {
					return errors.New("no such server")
				}
				return nil
			})
		}()
		looked := func(times int) {
			for range times + 1 {
				look <- syscall.SIGHUP
			}
			synctest.Wait() // all have been acted upon
		}
		looked(2)
		writeJoin(t, path, 0o600, "nats://127.0.0.1:2", two, one)
		looked(1)
		if next := <-applied; next.URL != "nats://127.0.0.1:2" || len(next.Secrets) != 2 || next.Secrets[0] != two {
			t.Errorf("%s, %v", next.URL, next.Secrets)
		}
		for _, wrong := range []func(){
			func() { os.Remove(path) },
			func() { writeJoin(t, path, 0o602, "nats://127.0.0.1:3", one) },
			func() {
				_ = os.WriteFile(path, []byte("nats://u:hunter2@127.0.0.1:3"), 0o600)
				_ = os.Chmod(path, 0o600)
			},
			func() { _ = os.WriteFile(path, bytes.Repeat([]byte("x"), maxJoin+1), 0o600) },
		} {
			wrong()
			looked(3)
		}
		writeJoin(t, path, 0o600, "nats://127.0.0.1:9", two)
		looked(3)
		<-applied
		cancel()
		<-done
		if len(applied) > 0 {
			t.Errorf("applied %v", <-applied)
		}
		text := log.String()
		if n := strings.Count(text, "level=WARN") - strings.Count(text, nothingElse); n != 5 || strings.Contains(text, "hunter2") || strings.Contains(text, one.Reveal()) {
			t.Errorf("%d warnings:\n%s", n, text)
		}
		for _, want := range []string{"no such file", "has mode 0602, so that anybody could choose this worker's fleet: run `chmod 600 ", "it has no fleet secret", "more than 16384 bytes", "no such server"} {
			if strings.Count(text, want) != 1 {
				t.Errorf("%d times %q:\n%s", strings.Count(text, want), want, text)
			}
		}
	})
}

// pipe makes a FIFO; whoever waits for a writer is let go at the end.
func pipe(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if w, err := os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0); err == nil {
			w.Close()
		}
	})
	return path
}

// TestPipe: a join file that is a pipe is read once, which is said. Before, it was
// opened again, which nothing ended.
func TestPipe(t *testing.T) {
	path := pipe(t)
	secret := trust.NewSecret()
	go func() {
		line := trust.Join{URL: "nats://127.0.0.1:1", Secrets: []trust.Secret{secret}}
		_ = os.WriteFile(path, []byte(line.Reveal()+"\n"), 0) // the reader says what is wrong
	}()
	j, err := readJoining(t.Context(), "", path)
	if err != nil || !j.once || len(j.Secrets) != 1 || j.Secrets[0] != secret {
		t.Fatal(j.once, err)
	}
	var log bytes.Buffer
	look := make(chan os.Signal)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		j.follow(ctx, look, slog.New(slog.NewTextHandler(&log, nil)), func(trust.Join) error {
			t.Error("something is applied")
			return nil
		})
	}()
	within := time.After(20 * time.Second)
	for range 2 {
		select {
		case look <- syscall.SIGHUP:
		case <-within:
			t.Fatal("it does not look")
		}
	}
	cancel()
	select {
	case <-done:
	case <-within:
		t.Fatal("it does not end")
	}
	if text := log.String(); strings.Count(text, "level=INFO") != 1 || !strings.Contains(text, "not a regular file") || strings.Count(text, nothingElse) != 2 {
		t.Error(text)
	}
}

// TestPipeForFile: nor is a pipe opened that has taken the place of a file.
func TestPipeForFile(t *testing.T) {
	path := pipe(t)
	j := joining{file: path}
	read := make(chan error, 1)
	go func() {
		_, err := j.reread()
		read <- err
	}()
	select {
	case err := <-read:
		if err == nil || !strings.Contains(err.Error(), "no regular file any more") {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it waits for a writer")
	}
}

// TestPipeWithoutWriter: a command that waits for a writer can be stopped, be it that of its join file or
// of its configuration.
func TestPipeWithoutWriter(t *testing.T) {
	t.Setenv("XPYD_JOIN_FILE", pipe(t))
	for _, args := range [][]string{{"decode"}, {"router"}, {"up"}, {"decode", "--config", pipe(t)}, {"router", "--config", pipe(t)}, {"up", "--config", pipe(t)}} {
		command := strings.Join(args, " ")
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		code := make(chan int, 1)
		var out, errs bytes.Buffer
		go func() {
			stopped, stop := context.WithCancel(context.Background())
			context.AfterFunc(ctx, stop)
			code <- run(stopped, args, &out, &errs)
		}()
		select {
		case got := <-code:
			if got != exitDone || errs.Len() > 0 || ctx.Err() == nil {
				t.Errorf("%s: exit code %d, %q", command, got, errs.String())
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s does not end", command)
		}
		cancel()
	}
}

// TestJoinFileOfOthers: a writer of the join file chooses the fleet, so only this user and root
// may write it. Readable by others is a warning.
func TestJoinFileOfOthers(t *testing.T) {
	f := func(path, want string) joining {
		t.Helper()
		j, err := readJoining(t.Context(), "", path)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		return j
	}
	path := filepath.Join(t.TempDir(), "join")
	mode := func(mode os.FileMode) string {
		writeJoin(t, path, mode, "", trust.NewSecret())
		return path
	}
	for m, open := range map[os.FileMode]bool{0o600: false, 0o400: false, 0o640: false, 0o644: true, 0o444: true} {
		if j := f(mode(m), ""); j.open != open {
			t.Errorf("%v: open is %v", m, j.open)
		}
	}
	f(mode(0o660), "has mode 0660, so that its group could choose this worker's fleet: run `chmod 600 "+path)
	f(mode(0o602), "has mode 0602, so that anybody could choose this worker's fleet: run `chmod 600 "+path)
	if os.Geteuid() != 0 {
		t.Log("not root: no file can be given to another user")
		return
	}
	theirs := func(path string) string {
		if err := os.Chown(path, 65534, 65534); err != nil {
			t.Fatal(err)
		}
		return path
	}
	f(theirs(mode(0o600)), "belongs to uid 65534, who could choose this worker's fleet, and this is uid 0")
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	f(link, link+" belongs to uid 65534")
	fifo := theirs(pipe(t))
	go func() { _ = os.WriteFile(fifo, nil, 0) }() // the reader says what is wrong
	f(fifo, "belongs to uid 65534")
}

func TestAnswersWhom(t *testing.T) {
	f := func(want bool, change func(*worker.Config, *joining)) {
		t.Helper()
		cfg, j := worker.DefaultConfig("decode"), joining{}
		change(&cfg, &j)
		if err := answersWhom(&cfg, &j); (err == nil) != want {
			t.Error(err)
		}
	}
	f(false, func(*worker.Config, *joining) {})
	f(true, func(_ *worker.Config, j *joining) { j.Secrets = []trust.Secret{trust.NewSecret()} })
	f(true, func(c *worker.Config, _ *joining) { c.TrustEveryone = true })
	f(true, func(c *worker.Config, _ *joining) { c.APIKeysFile = "keys.yaml" })
}

// TestNATSAddrs: the port of the time before comes first.
func TestNATSAddrs(t *testing.T) {
	f := func(want, before string) {
		t.Helper()
		if got := fmt.Sprint(natsAddrs("127.0.0.1:4222", trust.Join{URL: before})); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	f("[127.0.0.1:4222 127.0.0.1:0]", "")
	f("[127.0.0.1:40001 127.0.0.1:4222 127.0.0.1:0]", "tls://node-1:40001,nats://b:2")
	f("[127.0.0.1:4222 127.0.0.1:0]", "nats://node-1")
	f("[127.0.0.1:4222 127.0.0.1:0]", "nats://node-1:4222")
}

// alive runs a command line in this process until it prints text, calls then, and
// ends it.
func alive(t *testing.T, text string, then func(), args ...string) (code int, log string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var errs bytes.Buffer
	out := &upTo{text: text, then: func() {
		then()
		cancel()
	}}
	code = run(ctx, args, out, &errs)
	if !out.found {
		t.Errorf("%v: no %q in %q", args, text, out.all)
	}
	return code, errs.String()
}

func readData(t *testing.T, data, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(data, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestRouterKeepsItsFleet: a router that starts again has the same secret and the
// same port of NATS, though the usual one was taken. Before, it had other
// credentials each time, and failed.
func TestRouterKeepsItsFleet(t *testing.T) {
	if ln, err := net.Listen("tcp", "127.0.0.1:4222"); err == nil {
		defer ln.Close() // else somebody else has it
	}
	data := filepath.Join(t.TempDir(), "data")
	var joins, secrets []string
	for range 2 {
		code, log := alive(t, "join with: xpyd prefill --join-file "+data+"/join-url\n", func() {
			joins, secrets = append(joins, readData(t, data, fileJoin)), append(secrets, readData(t, data, fileSecret))
			if out, errs, code := xpyd(t, "secret", "scrape-token", "--data", data); code != 0 || out != readData(t, data, fileScrape) || len(out) < 20 {
				t.Errorf("%d %q %s", code, out, errs)
			}
			if text, _, code := xpyd(t, "secret", "scrape-token", "--join-file", filepath.Join(data, fileJoin)); code != 0 || text != readData(t, data, fileScrape) {
				t.Errorf("%d %q", code, text)
			}
		}, "router", "--data", data, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
		if code != exitDone {
			t.Fatalf("exit code %d, %s", code, log)
		}
		for _, name := range []string{fileToken, fileAdmin, "lock"} {
			if _, err := os.Stat(filepath.Join(data, name)); err == nil {
				t.Errorf("%s is left", name)
			}
		}
	}
	if joins[0] != joins[1] || secrets[0] != secrets[1] || strings.Contains(joins[0], ":4222#") || !strings.HasSuffix(joins[0], "#"+secrets[0]) {
		t.Errorf("%q and %q", joins, secrets)
	}
}

// TestUpForgets: `up` leaves nothing in a folder that it made, and the secret in one
// that was there.
func TestUpForgets(t *testing.T) {
	dir := t.TempDir()
	made, there := filepath.Join(dir, "made"), filepath.Join(dir, "there")
	if err := os.Mkdir(there, 0o700); err != nil {
		t.Fatal(err)
	}
	up := func(data string) {
		t.Helper()
		code, log := alive(t, "ready http", func() {}, "up", "--data", data, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--device", "cpu", "--threads", "1")
		if code != exitDone {
			t.Fatalf("exit code %d, %s", code, log)
		}
	}
	up(made)
	if _, err := os.Stat(made); !os.IsNotExist(err) {
		t.Errorf("the folder is left: %v", err)
	}
	up(there)
	secret := readData(t, there, fileSecret)
	up(there)
	if readData(t, there, fileSecret) != secret {
		t.Error("another secret")
	}
}

// TestSquatted: another user has made the data folder before, with links to what only
// we may write and an admin-url of his own. Before, the admin token was written into
// his file and sent to his socket, and the link was written through.
func TestSquatted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can be another user too; internal/datadir tests what needs none")
	}
	base, err := os.MkdirTemp("", "xpyd-squat-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(base)
	precious, data := filepath.Join(base, "precious"), filepath.Join(base, "open", "xpyd-0")
	if err := errors.Join(os.Chmod(base, 0o755), os.WriteFile(precious, []byte("precious"), 0o600),
		os.Mkdir(filepath.Dir(data), 0o777), os.Chmod(filepath.Dir(data), 0o777|os.ModeSticky)); err != nil {
		t.Fatal(err)
	}
	var heard atomic.Int32
	his := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		heard.Add(1)
		_, _ = w.Write([]byte(`{"ready":true}`))
	}))
	defer his.Close()
	squat := exec.Command("sh", "-c", `umask 0; mkdir "$1" && cd "$1" && echo "$3" >admin-url && echo his >admin-token &&
		for f in lock .admin-token .join-url join-url .fleet-secret; do ln -s "$2" $f; done`, "sh", data, precious, his.URL)
	squat.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := squat.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Setenv("XPYD_ADMIN_TOKEN", "the-real-token")
	for _, args := range [][]string{{"router", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"}, {"up"}, {"status"}, {"drain", "decode-0"}, {"scale", "decode=2"},
		{"secret", "rotate"}, {"secret", "scrape-token"}, {"admin", "cache"}} {
		out, errs, code := xpyd(t, append(args, "--data", data)...)
		want := fmt.Sprintf("data folder %s belongs to uid 65534 (mode 0777), and this is uid 0", data)
		if code != exitFailed || out != "" || !strings.Contains(errs, want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%v: exit code %d, %q %q", args, code, out, errs)
		}
	}
	if n := heard.Load(); n > 0 {
		t.Errorf("his socket was asked %d times", n)
	}
	if readData(t, data, fileToken) != "his\n" || readData(t, base, "precious") != "precious" {
		t.Errorf("%q was written to his file, %q through his link", readData(t, data, fileToken), readData(t, base, "precious"))
	}
	if list, err := os.ReadDir(data); err != nil || len(list) != 7 {
		t.Errorf("%v, %v", list, err)
	}
}

// TestDeadRouter: the files of a killed router send nobody anywhere: another user may listen at
// its address by now. Before, he got the admin token.
func TestDeadRouter(t *testing.T) {
	var heard atomic.Int32
	his := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		heard.Add(1)
		_, _ = w.Write([]byte(`{"ready":true}`))
	}))
	defer his.Close()
	data := t.TempDir()
	if err := os.Chmod(data, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{fileAdmin: his.URL, fileToken: "the-old-token", "lock": ""} {
		if err := os.WriteFile(filepath.Join(data, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, env := range []string{"", "the-real-token"} {
		t.Setenv("XPYD_ADMIN_TOKEN", env)
		for _, args := range [][]string{{"status"}, {"drain", "decode-0"}, {"scale", "decode=2"}, {"secret", "rotate"}, {"admin", "cache"}, {"drain", "decode-0", "--token", "said"}} {
			_, errs, code := xpyd(t, append(args, "--data", data)...)
			if want := "xpyd: no router runs on " + data + ": start one, or "; code != exitFailed || !strings.HasPrefix(errs, want) || strings.Count(errs, "\n") != 1 {
				t.Errorf("%v: exit code %d, %q", args, code, errs)
			}
		}
	}
	if n := heard.Load(); n > 0 {
		t.Errorf("he was asked %d times", n)
	}
	if _, errs, code := xpyd(t, "drain", "decode-0", "--admin", his.URL, "--data", data); code != exitDone || heard.Load() != 1 { // where the user says
		t.Errorf("exit code %d, %q", code, errs)
	}
}

// TestSecretRefused: what is wrong with the file of the secret is said with its path
// and what to do.
func TestSecretRefused(t *testing.T) {
	data := t.TempDir()
	path := filepath.Join(data, fileSecret)
	if err := os.Chmod(data, 0o700); err != nil {
		t.Fatal(err)
	}
	refused := func(want string) {
		t.Helper()
		_, errs, code := xpyd(t, "router", "--data", data, "--listen", "127.0.0.1:0", "--admin", "")
		if code != exitFailed || !strings.Contains(errs, path) || !strings.Contains(errs, want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("exit code %d, %q lacks %q", code, errs, want)
		}
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	refused("it is empty; put it back, or remove it: the router then makes a new one")
	for _, to := range []string{filepath.Join(t.TempDir(), "elsewhere"), "beside"} {
		if err := errors.Join(os.Remove(path), os.Symlink(to, path)); err != nil {
			t.Fatal(err)
		}
		refused("is a symbolic link, which is not followed: remove it, or put the file itself in its place")
	}
}

// TestRotate: a second secret replaces the first in every file, once no member is
// without it.
func TestRotate(t *testing.T) {
	data := filepath.Join(t.TempDir(), "data")
	lines := func() int { return strings.Count(readData(t, data, fileSecret), "\n") }
	said := func(want int, words string, args ...string) {
		t.Helper()
		out, errs, code := xpyd(t, append(append([]string{"secret"}, args...), "--data", data)...)
		if code != want || !strings.Contains(out+errs, words) {
			t.Errorf("%v: exit code %d, %q %q", args, code, out, errs)
		}
	}
	alive(t, "join with", func() {
		first, token := strings.TrimSpace(readData(t, data, fileSecret)), readData(t, data, fileScrape)
		said(exitDone, "in force")
		said(exitFailed, "there is one secret", "retire")
		said(exitDone, "older, accepted until", "rotate")
		said(exitFailed, "still replaces", "rotate")
		both := strings.Fields(readData(t, data, fileSecret))
		if len(both) != 2 || both[1] != first || !strings.HasSuffix(readData(t, data, fileJoin), "#"+both[0]+"+"+first+"\n") || readData(t, data, fileScrape) != token {
			t.Errorf("%q, %q", both, readData(t, data, fileJoin))
		}
		said(exitDone, "in force", "retire")
		if lines() != 1 || !strings.HasSuffix(readData(t, data, fileJoin), "#"+both[0]+"\n") || readData(t, data, fileScrape) == token {
			t.Errorf("%d secrets are left", lines())
		}
	}, "router", "--data", data, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
	dir, err := datadir.Own(data)
	if err != nil {
		t.Fatal(err)
	}
	if err := dir.Write(fileSecret, []byte("nonsense\n")); err != nil {
		t.Fatal(err)
	}
	dir.Close()
	if _, errs, code := xpyd(t, "router", "--data", data, "--listen", "127.0.0.1:0", "--admin", ""); code != exitFailed || !strings.Contains(errs, "put it back, or remove it") || strings.Contains(errs, "nonsense") {
		t.Errorf("exit code %d, %q", code, errs)
	}
}

// TestSecondRouterFollows: a router that joined with another's file has its secret,
// also when that is replaced, and does not replace it itself.
func TestSecondRouterFollows(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	quiet := []string{"--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "warn"}
	alive(t, "join with", func() {
		alive(t, "join with", func() {
			if readData(t, a, fileJoin) != readData(t, b, fileJoin) {
				t.Error("another join line")
			}
			if _, errs, code := xpyd(t, "secret", "rotate", "--data", b); code != exitFailed || !strings.Contains(errs, "from another router's join file") {
				t.Errorf("exit code %d, %q", code, errs)
			}
			if _, errs, code := xpyd(t, "secret", "rotate", "--data", a); code != exitDone {
				t.Errorf("exit code %d, %q", code, errs)
			}
			for end := time.Now().Add(time.Minute); readData(t, a, fileJoin) != readData(t, b, fileJoin); time.Sleep(10 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatal("it does not follow")
				}
			}
			out, _, _ := xpyd(t, "secret", "--data", b)
			if both, _, _ := strings.Cut(strings.TrimSpace(readData(t, a, fileSecret)), "\n"); !strings.Contains(out, parseSecret(t, both).ID()+"  in force, from "+a) || !strings.Contains(out, "older, accepted") {
				t.Errorf("%s", out)
			}
		}, append([]string{"router", "--data", b, "--join-file", filepath.Join(a, fileJoin)}, quiet...)...)
		if _, err := os.Stat(filepath.Join(b, fileSecret)); err == nil {
			t.Error("it has made a secret of its own")
		}
	}, append([]string{"router", "--data", a}, quiet...)...)
}

func parseSecret(t *testing.T, text string) trust.Secret {
	t.Helper()
	s, err := trust.ParseSecret(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
