package kvconn_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
)

var record = flag.Bool("record", false, "record the traffic of this version's scenes under testdata")

// recordings returns the directories of recorded versions.
func recordings(t *testing.T) []string {
	t.Helper()
	dirs, err := filepath.Glob("testdata/v*")
	if err != nil || len(dirs) == 0 {
		t.Fatalf("no recordings: %v", err)
	}
	return dirs
}

func load(t *testing.T, path string) kvconntest.Recording {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var r kvconntest.Recording
	if err := r.UnmarshalText(text); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return r
}

// TestRecord checks that every scene works between two peers of this build.
// With -record it writes down what they said: once a release, and until the first
// whenever it changes.
func TestRecord(t *testing.T) {
	for _, s := range kvconntest.Scenes {
		t.Run(s.Name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ch := kvconntest.NewChaos(kvconntest.NewMemory(64 << 10))
				rec := kvconntest.Record(ch)
				w := s.World(t, ch)
				s.Drive(w)
				w.Empty(time.Second)
				time.Sleep(time.Second) // the last words
				s.Judge(w)
				w.Close()
				if *record && !t.Failed() {
					write(t, s.Name, rec())
				}
			})
		})
	}
}

func write(t *testing.T, name string, rec kvconntest.Recording) {
	t.Helper()
	text, err := rec.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	dir := fmt.Sprintf("testdata/v%d", kvconn.ProtocolMax)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".txt"), text, 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestRecordedText: the files say what they say in one way only.
func TestRecordedText(t *testing.T) {
	for _, dir := range recordings(t) {
		paths, err := filepath.Glob(dir + "/*.txt")
		if err != nil || len(paths) < len(kvconntest.Scenes) {
			t.Errorf("%s: %d recordings of %d scenes: %v", dir, len(paths), len(kvconntest.Scenes), err)
		}
		for _, path := range paths {
			text, _ := os.ReadFile(path)
			if again, err := load(t, path).MarshalText(); err != nil || !bytes.Equal(again, text) {
				t.Errorf("%s is not what is written again: %v", path, err)
			}
		}
	}
}

// TestReplay plays every recorded scene of every released version against this
// build: its receivers against the recorded sender, its senders against the
// recorded receiver.
func TestReplay(t *testing.T) {
	for _, dir := range recordings(t) {
		for _, s := range kvconntest.Scenes {
			rec := load(t, filepath.Join(dir, s.Name+".txt"))
			name := filepath.Base(dir) + "/" + s.Name
			t.Run(name+"/recorded-sender", func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { replaySender(t, s, rec) })
			})
			t.Run(name+"/recorded-receiver", func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { replayReceiver(t, s, rec) })
			})
		}
	}
}

func replaySender(t *testing.T, s kvconntest.Scene, rec kvconntest.Recording) {
	tr := kvconntest.NewMemory(64 << 10)
	w := s.World(t, tr)
	ln, err := tr.Listen("recorded")
	if err != nil {
		t.Fatal(err)
	}
	w.Addr = "recorded"
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- kvconntest.ReplaySender(ctx, ln, rec) }()
	s.Drive(w)
	w.Empty(time.Second)
	time.Sleep(time.Second) // the last words
	cancel()
	if err := <-done; err != nil {
		t.Errorf("recorded sender: %v", err)
	}
	w.Close()
}

func replayReceiver(t *testing.T, s kvconntest.Scene, rec kvconntest.Recording) {
	tr := kvconntest.NewMemory(64 << 10)
	w := s.World(t, tr)
	if err := kvconntest.ReplayReceiver(t.Context(), tr, w.Addr, rec, func() {
		w.Empty(time.Second)
		time.Sleep(time.Second)
	}); err != nil {
		t.Errorf("recorded receiver: %v", err)
	}
	s.Judge(w)
	w.Close()
}
