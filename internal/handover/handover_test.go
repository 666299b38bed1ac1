package handover_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/handover"
)

const (
	limit    = time.Minute
	variable = "XPYD_HANDOVER"
	heirEnv  = "HANDOVER_TEST_HEIR"
)

func TestMain(m *testing.M) {
	if os.Getenv(heirEnv) != "" {
		if err := heir(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(9)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

type note struct{ Text string }

// heir answers each connection that it accepts on the listener that it was given with the note that
// it was told, until the other process closes the line.
func heir() error {
	place, err := handover.Here()
	if err != nil {
		return err
	}
	defer place.Close()
	if os.Getenv(variable) != "" || place.First() {
		return errors.New("the variable is still there, or it is no heir")
	}
	ln, err := place.Listener("door")
	if err != nil {
		return err
	}
	if again, err := place.Listener("door"); again != nil || err != nil {
		return fmt.Errorf("the listener is there twice: %v", err)
	}
	var n note
	talk := place.Heir()
	if err := talk.Receive(&n, time.Now().Add(limit)); err != nil {
		return err
	}
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, n.Text)
			c.Close()
		}
	}()
	if err := talk.Send(&note{"ready"}); err != nil {
		return err
	}
	if err := talk.Receive(&n, time.Time{}); !errors.Is(err, io.EOF) {
		return fmt.Errorf("the line's end is %w", err)
	}
	gone, err := place.Gone(context.Background())
	if err != nil {
		return err
	}
	select {
	case <-gone:
		return errors.New("the first process is gone")
	default:
		return ln.Close()
	}
}

func start(t *testing.T, p *handover.Place, path string, args ...string) *handover.Successor {
	t.Helper()
	s, err := p.Start(path, args, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestHandover: an heir has the listener and hears what it is told; both accept at once, and the old
// one's listener can still be closed.
func TestHandover(t *testing.T) {
	t.Setenv(heirEnv, "1")
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	door, err := handover.Socket(ln)
	if err != nil {
		t.Fatal(err)
	}
	var place handover.Place
	if !place.First() || place.Heir() != nil || place.File("door") != nil {
		t.Error("a process that a user started has inherited something")
	}
	if gone, err := place.Gone(t.Context()); gone != nil || err != nil {
		t.Errorf("the first process waits for its own end: %v", err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s, err := place.Start(self, nil, []handover.File{{Name: "door", File: door}})
	if err != nil {
		t.Fatal(err)
	}
	door.Close()
	var n note
	if err := s.Receive(&n, time.Now().Add(10*time.Millisecond)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("nothing was said, and heard %v", err)
	}
	if err := s.Send(&note{"hello"}); err != nil {
		t.Fatal(err)
	}
	if err := s.Receive(&n, time.Now().Add(limit)); err != nil || n.Text != "ready" {
		t.Fatalf("%q, %v", n.Text, err)
	}
	closed := make(chan error, 1)
	go func() {
		_, err := ln.Accept()
		closed <- err
	}()
	ln.Close()
	if err := <-closed; !errors.Is(err, net.ErrClosed) { // a blocking socket would accept on
		t.Errorf("accept ended with %v", err)
	}
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if b, err := io.ReadAll(c); string(b) != "hello" {
		t.Errorf("the heir says %q, %v", b, err)
	}
	s.Talk.Close()
	<-s.Done()
	if err := s.Ended(); err != nil {
		t.Error(err)
	}
}

// TestStay: the first process stays for its successor and for whom that one started, and tells how
// the last one ended.
func TestStay(t *testing.T) {
	for script, want := range map[string]string{
		"exit 0":                       "",
		"exit 7":                       "exit status 7",
		"kill -KILL $$":                "killed",
		"(sleep 0.1; exit 5) & exit 0": "exit status 5",
		"(sleep 0.1; exit 0) & exit 3": "",
		"(sleep 0.1; exec sh -c 'kill $$') & exit 0": "terminated",
	} {
		var place handover.Place
		s := start(t, &place, "/bin/sh", "-c", script)
		err := place.Stay(s)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v", script, err)
		}
		s.Talk.Close()
	}
}

// TestForward: a signal reaches the successor's successor too.
func TestForward(t *testing.T) {
	var place handover.Place
	s := start(t, &place, "/bin/sh", "-c", `(trap 'exit 6' TERM; echo '{}' >&4; while :; do sleep 0.01; done) & exit 0`)
	defer s.Talk.Close()
	if err := s.Receive(&note{}, time.Now().Add(limit)); err != nil {
		t.Fatal(err)
	}
	s.Forward(syscall.SIGTERM)
	if err := place.Stay(s); err == nil || !strings.Contains(err.Error(), "exit status 6") {
		t.Error(err)
	}
}

// TestEnd: one that does not end when asked to is killed.
func TestEnd(t *testing.T) {
	var place handover.Place
	s := start(t, &place, "/bin/sh", "-c", `trap '' TERM; echo '{}' >&4; exec sleep 1000`)
	if err := s.Receive(&note{}, time.Now().Add(limit)); err != nil {
		t.Fatal(err)
	}
	if err := s.End(50 * time.Millisecond); err != nil {
		t.Error(err)
	}
	if err := s.Ended(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("it ended with %v", err)
	}
	if _, err := place.Start("/nowhere", nil, nil); err == nil {
		t.Error("a program that is not there started")
	}
}

// TestTalk: messages are bounded both ways, and the other end's end is told.
func TestTalk(t *testing.T) {
	var place handover.Place
	s := start(t, &place, "/bin/sh", "-c", `head -c 70000 /dev/zero | tr '\0' x >&4; exit 0`)
	if err := s.Send(&note{strings.Repeat("x", 64<<10)}); err == nil {
		t.Error("a message too long is sent")
	}
	if err := s.Receive(&note{}, time.Now().Add(limit)); err == nil || !strings.Contains(err.Error(), "more than 65536 bytes") {
		t.Errorf("a message too long: %v", err)
	}
	if err := s.End(limit); err != nil {
		t.Error(err)
	}
	s = start(t, &place, "/bin/sh", "-c", `echo nonsense >&4`)
	if err := s.Receive(&note{}, time.Now().Add(limit)); err == nil || !strings.Contains(err.Error(), "invalid character") {
		t.Errorf("nonsense: %v", err)
	}
	if err := s.Receive(&note{}, time.Now().Add(limit)); !errors.Is(err, io.EOF) {
		t.Errorf("the end: %v", err)
	}
	if err := s.End(limit); err != nil {
		t.Error(err)
	}
}

// TestHereRefuses: what this version does not understand is an error.
func TestHereRefuses(t *testing.T) {
	for _, text := range []string{"2:life,talk", "1", "1:life", "1:a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s,t,u,v,w,x,y,z"} {
		t.Setenv(variable, text)
		if p, err := handover.Here(); err == nil {
			p.Close()
			t.Errorf("%q is taken", text)
		}
	}
}
