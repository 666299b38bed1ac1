package requestlog_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/requestlog"
)

func header() requestlog.Header {
	return requestlog.Header{Xpyd: "1.2.3", Models: []string{"m"}, Policy: "prefix", Grain: []requestlog.Grain{{From: 0, Bytes: 10}, {From: 20, Bytes: 100}}}
}

// write has a writer write to a path.
func write(t *testing.T, path string, use func(*requestlog.Writer)) {
	t.Helper()
	w, err := requestlog.New(requestlog.Config{File: path, MaxBytes: 4 << 20}, header, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	w.Start()
	use(w)
	w.Close()
}

func read(t *testing.T, path string) *requestlog.Log {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l, err := requestlog.Read(f)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return l
}

// TestRoundTrip: what is added can be read, sorted by arrival; hashes show what is equal within a file, and nothing
// between two.
func TestRoundTrip(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	cached, ms := 3, requestlog.Millis(time.Millisecond)
	full := requestlog.Request{Path: "/v1/completions", Model: "m", Stream: true, Status: 200, Broken: true, Prompt: 12, Estimated: true, Output: 7, Cached: &cached,
		Choices: 2, TTFT: 5 * ms / 2, Took: 10 * ms, Gap: 4 * ms, Prefill: "p", Decode: "d", Attempts: 2, Bytes: 130}
	started := time.Now()
	for range 2 {
		write(t, path, func(w *requestlog.Writer) {
			w.Add(started.Add(time.Hour), &full, []uint64{1, 2, 3})
			w.Add(started.Add(time.Minute), &requestlog.Request{Path: "/v1/completions", Status: 503, Bytes: 20, Took: ms}, []uint64{1, 9})
		})
	}
	l := read(t, path)
	if l.Xpyd != "1.2.3" || l.Policy != "prefix" || !slices.Equal(l.Models, []string{"m"}) || l.Start.Before(started) || l.Dropped != 0 || len(l.Requests) != 2 {
		t.Fatalf("%+v", l)
	}
	first, last := l.Requests[0], l.Requests[1]
	if first.Status != 503 || first.Line != 3 || last.Line != 2 || last.Arrived-first.Arrived != requestlog.Millis(59*time.Minute) {
		t.Errorf("%+v\n%+v", first, last)
	}
	if first.Prefix[0] != last.Prefix[0] || first.Prefix[1] == last.Prefix[1] || first.Prefix[0] == 1 {
		t.Errorf("hashes %x and %x", first.Prefix, last.Prefix)
	}
	if ends := l.Ends(&last); !slices.Equal(ends, []int{10, 20, 120}) {
		t.Errorf("ends %v", ends)
	}
	if older := read(t, path+".1"); older.Requests[0].Prefix[0] == first.Prefix[0] {
		t.Error("two files have one key")
	}
	last.Prefix, last.Arrived, last.Line = nil, 0, 0
	if !reflect.DeepEqual(last, full) {
		t.Errorf("%+v, want %+v", last, full)
	}
	for _, p := range []string{path, path + ".1"} {
		if info, err := os.Stat(p); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", p, info.Mode(), err)
		}
	}
}

// TestOdd: whatever is added can be read.
func TestOdd(t *testing.T) {
	path, name, many := filepath.Join(t.TempDir(), "log"), strings.Repeat("é", 1000), -5
	write(t, path, func(w *requestlog.Writer) {
		w.Add(time.Now().Add(-time.Hour), &requestlog.Request{Path: name, Model: name, Prefill: name, Decode: name, Status: 200, Prompt: 1 << 40, Output: -1, Cached: &many,
			Choices: 1 << 40, Attempts: 1 << 40, TTFT: 2, Gap: 3, Bytes: 1 << 40}, make([]uint64, 100_000))
	})
	if l := read(t, path); len(l.Requests) != 1 || l.Requests[0].Arrived > 0 || l.Requests[0].Cached != nil || len(l.Requests[0].Prefix) != 8192 {
		t.Errorf("%+v", l.Requests)
	}
}

// TestRefuses: what is wrong with a file is said, with its line.
func TestRefuses(t *testing.T) {
	head, err := json.Marshal(requestlog.Header{Version: requestlog.Version, Grain: header().Grain})
	if err != nil {
		t.Fatal(err)
	}
	const ok = `{"at_ms":1,"status":200,"took_ms":3}` + "\n"
	for want, text := range map[string]string{
		"line 1: no header":               "",
		"line 1: no header of":            ok,
		"line 1: no header of a":          "x\n",
		"of version 2, and":               `{"request_log":2}` + "\n",
		"line 1: grain []":                `{"request_log":1}` + "\n",
		"line 1: grain [{5 1}]":           `{"request_log":1,"grain":[{"from":5,"bytes":1}]}` + "\n",
		"line 1: grain [{0 0}]":           `{"request_log":1,"grain":[{"from":0,"bytes":0}]}` + "\n",
		"line 1: grain [{0 1} {0 1}]":     `{"request_log":1,"grain":[{"from":0,"bytes":1},{"from":0,"bytes":1}]}` + "\n",
		"line 1: the text \"x\\x1b\"":     `{"request_log":1,"grain":[{"from":0,"bytes":1}],"xpyd":"x\u001b"}` + "\n",
		"line 2: the text \"m\\n\"":       `{"status":200,"model":"m\n"}` + "\n",
		"line 3: invalid character":       ok + "{]\n",
		"line 1: it is compressed by":     "\x1f\x8b\x08",
		"line 3: another header":          ok + string(head) + "\n",
		"its status is 0":                 `{"at_ms":1}` + "\n",
		"line 2: token counts":            `{"status":200,"prompt_tokens":-1}` + "\n",
		"line 2: token counts that":       `{"status":200,"output_tokens":99999999}` + "\n",
		"line 2: token counts that are":   `{"status":200,"cached_tokens":-1}` + "\n",
		"line 2: choices -1":              `{"status":200,"choices":-1}` + "\n",
		"line 2: ttft_ms":                 `{"status":200,"ttft_ms":4,"took_ms":3}` + "\n",
		"line 2: ttft_ms and":             `{"status":200,"longest_gap_ms":-4,"took_ms":3}` + "\n",
		`line 2: "1e99" is no time`:       `{"status":200,"at_ms":1e99}` + "\n",
		`line 2: "null" is no time`:       `{"status":200,"at_ms":null}` + "\n",
		"line 2: 2 hashes of 1 bytes":     `{"status":200,"prompt_bytes":1,"prefix":["0000000000000000","0000000000000001"]}` + "\n",
		"line 2: want hashes":             `{"status":200,"prompt_bytes":1,"prefix":["00000000000000"]}` + "\n",
		"line 2: a name of more than":     `{"status":200,"model":"` + strings.Repeat("x", 1025) + `"}` + "\n",
		"line 2: dropped -1":              `{"dropped":-1}` + "\n",
		"line 2: more than 1048576 bytes": strings.Repeat(" ", 1<<20) + "\n",
	} {
		if !strings.HasPrefix(want, "line 1") && !strings.HasPrefix(want, "of version") {
			text = string(head) + "\n" + text
		}
		if l, err := requestlog.Read(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) || l != nil {
			t.Errorf("%.80q: %v, want %q", text, err, want)
		}
	}
	for _, c := range []struct {
		end      string
		requests int
		cut      bool
	}{{`{"at_ms":`, 1, true}, {"", 1, false}, {"\n\n  ", 1, false}, {strings.TrimSpace(ok), 2, false}, {ok[:len(ok)-2], 1, true}} {
		l, err := requestlog.Read(strings.NewReader(string(head) + "\n" + ok + "\n" + `{"dropped":2}` + "\n" + c.end))
		if err != nil || len(l.Requests) != c.requests || l.Dropped != 2 || l.Cut != c.cut {
			t.Errorf("a file that ends with %q: %+v, %v", c.end, l, err)
		}
	}
}

// FuzzRead: what is read is within its bounds, and is read again as it was.
func FuzzRead(f *testing.F) {
	head, _ := json.Marshal(requestlog.Header{Version: requestlog.Version, Grain: header().Grain})
	for _, line := range []string{`{"at_ms":-1.5,"path":"/v1/completions","model":"m","stream":true,"status":200,"prompt_tokens":10,"output_tokens":5,"cached_tokens":0,"ttft_ms":1,"took_ms":2.001,"longest_gap_ms":0.5,"prefill":"p","decode":"d","attempts":1,"prompt_bytes":300,"prefix":["0123456789abcdef"]}`,
		`{"dropped":3}`, `{"status":499,"choices":4,"broken":true,"estimated":true}`} {
		f.Add(append(slices.Concat(head, []byte("\n"+line)), '\n'))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		l, err := requestlog.Read(bytes.NewReader(text))
		if err != nil {
			if l != nil {
				t.Fatal("a log beside an error")
			}
			return
		}
		var again bytes.Buffer
		e := json.NewEncoder(&again)
		_ = e.Encode(l.Header)
		for i := range l.Requests {
			q := &l.Requests[i]
			q.Line = i + 2
			if last := append(l.Ends(q), 0)[max(len(l.Ends(q))-1, 0)]; last > q.Bytes || q.Prompt < 0 || q.Output < 0 {
				t.Fatalf("%+v", q)
			}
			_ = e.Encode(q)
		}
		same, err := requestlog.Read(&again)
		if err != nil || len(same.Requests) != len(l.Requests) || len(l.Requests) > 0 && !reflect.DeepEqual(same.Requests, l.Requests) {
			t.Fatalf("%v\n%+v\n%+v", err, same, l.Requests)
		}
	})
}
