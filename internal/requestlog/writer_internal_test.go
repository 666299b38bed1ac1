package requestlog

import (
	"bytes"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func newWriter(t *testing.T, path string) (*Writer, *bytes.Buffer) {
	t.Helper()
	said := &bytes.Buffer{}
	header := func() Header { return Header{Grain: []Grain{{0, 16}}} }
	w, err := New(Config{File: path, MaxBytes: 4 << 20}, header, slog.New(slog.NewTextHandler(said, nil)))
	if err != nil {
		t.Fatal(err)
	}
	return w, said
}

func request(hashes int) (r Request, chain []uint64) {
	return Request{Path: "/v1/completions", Status: 200, Bytes: 16 * hashes}, make([]uint64, hashes)
}

func open(t *testing.T, path string) *Log {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	l, err := Read(bytes.NewReader(b))
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return l
}

// TestNeverWaits: what finds the queue full is dropped, which is counted and stands in the log.
func TestNeverWaits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	w, _ := newWriter(t, path)
	r, chain := request(3)
	for range queued + 7 {
		w.Add(time.Now(), &r, chain)
	}
	if w.Dropped() != 7 {
		t.Errorf("%d dropped", w.Dropped())
	}
	w.Start()
	w.Close()
	w.Close()
	if l := open(t, path); len(l.Requests) != queued || l.Dropped != 7 {
		t.Errorf("%d requests, %d dropped", len(l.Requests), l.Dropped)
	}
}

// TestTakenOver: a router that hands over writes on where its file was moved to, and leaves the other's
// where it is when its own is full.
func TestTakenOver(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	old, said := newWriter(t, path)
	r, chain := request(maxPrefix)
	old.write(&entry{time.Now(), r, chain})
	next, _ := newWriter(t, path)
	next.write(&entry{time.Now(), r, chain})
	for range 30 {
		old.write(&entry{time.Now(), r, chain})
	}
	next.write(&entry{time.Now(), r, chain})
	next.file.close()
	old.file.close()
	if l := open(t, path); len(l.Requests) != 2 {
		t.Errorf("the new one's has %d requests", len(l.Requests))
	}
	kept := len(open(t, path+".1").Requests)
	if kept < 2 || kept+int(old.Dropped()) != 31 || !strings.Contains(said.String(), "is another's by now") {
		t.Errorf("the old one's has %d requests, %d dropped: %s", kept, old.Dropped(), said)
	}
}

// TestBounded: the files stay within their bound together, and each is a log of its own.
func TestBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	w, _ := newWriter(t, path)
	r, chain := request(maxPrefix)
	for range 30 {
		w.write(&entry{time.Now(), r, chain})
	}
	w.file.close()
	total, started := int64(0), time.Now()
	list, _ := filepath.Glob(path + "*")
	for _, p := range list {
		info, err := os.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		total += info.Size()
	}
	if len(list) != kept+1 || total > 4<<20 || total < 2<<20 {
		t.Errorf("%v of %d bytes", list, total)
	}
	for i := range kept + 1 {
		l := open(t, w.file.named(i))
		if len(l.Requests) == 0 || !l.Start.Before(started) {
			t.Errorf("%s is of %v, and the next one of %v", w.file.named(i), l.Start, started)
		}
		started = l.Start
	}
}

// TestFull: a full disk is said once, leaves no half line, and what it cost stands in the log once there is
// room.
func TestFull(t *testing.T) {
	signal.Ignore(syscall.SIGXFSZ)
	defer signal.Reset(syscall.SIGXFSZ)
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "log")
	w, said := newWriter(t, path)
	r, chain := request(3)
	w.write(&entry{time.Now(), r, chain})
	now := was
	now.Cur = uint64(w.file.size) + 20
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &now); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		w.write(&entry{time.Now(), r, chain})
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(said.String(), "left out until"); n != 1 || w.Dropped() != 3 {
		t.Errorf("said %d times, %d dropped\n%s", n, w.Dropped(), said)
	}
	if l := open(t, path); len(l.Requests) != 1 {
		t.Errorf("%d requests", len(l.Requests))
	}
	w.write(&entry{time.Now(), r, chain})
	w.file.close()
	if l := open(t, path); len(l.Requests) != 2 || l.Dropped != 3 || !strings.Contains(said.String(), "written again") {
		t.Errorf("%d requests, %d dropped\n%s", len(l.Requests), l.Dropped, said)
	}
}

// TestGone: a file that cannot even be cut is left, and the next one is begun.
func TestGone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	w, _ := newWriter(t, path)
	r, chain := request(3)
	w.write(&entry{time.Now(), r, chain})
	w.file.File.Close()
	w.write(&entry{time.Now(), r, chain})
	w.write(&entry{time.Now(), r, chain})
	w.file.close()
	if l, older := open(t, path), open(t, path+".1"); len(l.Requests) != 1 || len(older.Requests) != 1 || l.Dropped != 1 {
		t.Errorf("%+v and %+v", l, older)
	}
}

// TestMoved: a file that was moved away is followed until somebody says so.
func TestMoved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	w, _ := newWriter(t, path)
	r, chain := request(3)
	add := func() {
		t.Helper()
		w.write(&entry{time.Now(), r, chain})
	}
	add()
	w.Reopen() // it is still there
	add()
	if err := os.Rename(path, path+".old"); err != nil {
		t.Fatal(err)
	}
	add()
	w.Reopen()
	add()
	w.file.close()
	if l, old := open(t, path), open(t, path+".old"); len(l.Requests) != 1 || len(old.Requests) != 3 {
		t.Errorf("%d requests, and %d in the old one", len(l.Requests), len(old.Requests))
	}
}

// TestNone: no Writer is one that does nothing.
func TestNone(t *testing.T) {
	var w *Writer
	w.Reopen()
	w.Close()
	if w.Dropped() != 0 {
		t.Error("dropped by nobody")
	}
}

// BenchmarkWrite is a request of 100,000 tokens.
func BenchmarkWrite(b *testing.B) {
	w, err := New(Config{File: filepath.Join(b.TempDir(), "log"), MaxBytes: 1 << 30}, func() Header { return Header{Grain: []Grain{{0, 16}}} }, slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	r, chain := request(250)
	for b.Loop() {
		w.write(&entry{time.Now(), r, chain})
	}
	w.file.close()
}
