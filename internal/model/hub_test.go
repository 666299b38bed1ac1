package model_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/modeltest"
)

const patience = time.Minute

// get downloads hf:acme/tiny from h.
func get(t *testing.T, h *fakeHub) (string, error) {
	t.Helper()
	return model.FetchFast(t.Context(), "hf:acme/tiny", h.options(), patience)
}

// whole checks that the snapshot has all wanted files, and no leftovers lie
// in the cache.
func whole(t *testing.T, h *fakeHub, dir string) {
	t.Helper()
	if want := filepath.Join(h.repo(), "snapshots", h.commit); dir != want {
		t.Errorf("snapshot %s, want %s", dir, want)
	}
	for name, content := range h.files {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if name == "README.md" || name == "onnx/model.onnx" {
			if err == nil {
				t.Errorf("%s was downloaded", name)
			}
			continue
		}
		if err != nil || string(got) != string(content) {
			t.Errorf("%s: %d bytes, want %d: %v", name, len(got), len(content), err)
		}
		if to, err := os.Readlink(filepath.Join(dir, name)); err != nil || to != "../../blobs/"+h.sum(name) {
			t.Errorf("%s leads to %s, %v", name, to, err)
		}
	}
	if ref, err := os.ReadFile(filepath.Join(h.repo(), "refs", "main")); err != nil || string(ref) != h.commit {
		t.Errorf("ref %q, %v", ref, err)
	}
	if left, _ := filepath.Glob(filepath.Join(h.repo(), "blobs", "*.incomplete")); len(left) > 0 {
		t.Errorf("left over: %v", left)
	}
}

func TestHubOpen(t *testing.T) {
	h := newFakeHub(t, modeltest.HFOptions{Shards: 2})
	opts := h.options()
	opts.CacheDir = t.TempDir()
	var last model.Progress
	opts.Progress = func(p model.Progress) {
		if p.Phase == "download" {
			last = p
		}
	}
	m, err := model.Open(t.Context(), "hf:acme/tiny", opts)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if m.Name != "acme/tiny" {
		t.Errorf("name %q", m.Name)
	}
	if _, _, tmpl := m.TokenizerFiles(); string(tmpl) != "{{ messages }}" {
		t.Errorf("template %q", tmpl)
	}
	whole(t, h, filepath.Join(h.repo(), "snapshots", commit1))
	want := len(h.files["model-00001-of-00002.safetensors"]) + len(h.files["model-00002-of-00002.safetensors"])
	if last.Done != last.Total || last.Total != int64(want) {
		t.Errorf("last progress %+v, want %d bytes", last, want)
	}
}

func TestHubCache(t *testing.T) {
	h := newFakeHub(t, modeltest.HFOptions{})
	f := func(name string, want ...string) {
		t.Helper()
		dir, err := get(t, h)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		whole(t, h, dir)
		if got := h.log(); !slices.Equal(got, want) {
			t.Errorf("%s: requests %v, want %v", name, got, want)
		}
	}
	f("first", "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json")
	f("second")
	if err := os.RemoveAll(filepath.Join(h.repo(), "snapshots", commit1, "tokenizer.json")); err != nil {
		t.Fatal(err)
	}
	f("a link is gone, its blob is not")
	h.mu.Lock()
	h.commit, h.files["tokenizer.json"] = commit2, []byte("new")
	h.mu.Unlock()
	f("a new commit with one new file", "tokenizer.json")

	h.refuse = func(*http.Request) int { return 503 }
	if dir, err := get(t, h); err != nil || !strings.HasSuffix(dir, commit2) {
		t.Errorf("hub is ill: %s, %v", dir, err)
	}
	h.refuse = func(*http.Request) int { return 403 }
	if _, err := get(t, h); err == nil {
		t.Error("access was withdrawn, and nobody said so")
	}
	h.hub.Close()
	if dir, err := get(t, h); err != nil || !strings.HasSuffix(dir, commit2) {
		t.Errorf("hub is gone: %s, %v", dir, err)
	}
	if dir, err := model.FetchFast(t.Context(), "hf:acme/tiny@"+commit1, h.options(), patience); err != nil || !strings.HasSuffix(dir, commit1) {
		t.Errorf("pinned commit: %s, %v", dir, err)
	}
	h.env["HF_HUB_OFFLINE"] = "1"
	if dir, err := get(t, h); err != nil || !strings.HasSuffix(dir, commit2) {
		t.Errorf("offline: %s, %v", dir, err)
	}
	if err := os.Remove(filepath.Join(h.repo(), "blobs", h.sum("model.safetensors"))); err != nil {
		t.Fatal(err)
	}
	if _, err := get(t, h); err == nil || !strings.Contains(err.Error(), "HF_HUB_OFFLINE") {
		t.Errorf("offline without weights: %v", err)
	}
}

func TestHubRevision(t *testing.T) {
	h := newFakeHub(t, modeltest.HFOptions{})
	if _, err := model.FetchFast(t.Context(), "hf:acme/tiny@refs/pr/1", h.options(), patience); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(h.repo(), "refs", "refs", "pr", "1")); err != nil || string(b) != commit1 {
		t.Errorf("ref %q, %v", b, err)
	}
}

// cut answers with n bytes of the rest and breaks the connection.
func cut(w http.ResponseWriter, r *http.Request, content []byte, n int) bool {
	from := 0
	fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-", &from)
	w.Header().Set("Content-Length", strconv.Itoa(len(content)-from))
	if from > 0 {
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(content)-1, len(content)))
		w.WriteHeader(http.StatusPartialContent)
	}
	w.Write(content[from:min(len(content), from+n)])
	w.(http.Flusher).Flush()
	panic(http.ErrAbortHandler)
}

func TestHubResumes(t *testing.T) {
	h := newFakeHub(t, modeltest.HFOptions{})
	times := 0
	h.hook = func(w http.ResponseWriter, r *http.Request, name string, content []byte) bool {
		if name != "model.safetensors" {
			return false
		}
		if times++; times <= 3 {
			return cut(w, r, content, 100_000)
		}
		return false
	}
	dir, err := get(t, h)
	if err != nil {
		t.Fatal(err)
	}
	whole(t, h, dir)
	if log := h.log(); !slices.Contains(log, "model.safetensors 100000-") || !slices.Contains(log, "model.safetensors 300000-") {
		t.Errorf("requests %v", log)
	}
}

func TestHubResumesAcrossRuns(t *testing.T) {
	f := func(name string, part func(content []byte) []byte, want ...string) {
		t.Run(name, func(t *testing.T) {
			h := newFakeHub(t, modeltest.HFOptions{})
			content := h.files["model.safetensors"]
			blobs := filepath.Join(h.repo(), "blobs")
			if err := os.MkdirAll(blobs, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(blobs, h.sum("model.safetensors")+".incomplete"), part(content), 0o644); err != nil {
				t.Fatal(err)
			}
			dir, err := get(t, h)
			if err != nil {
				t.Fatal(err)
			}
			whole(t, h, dir)
			got := slices.DeleteFunc(h.log(), func(s string) bool { return !strings.HasPrefix(s, "model") })
			if !slices.Equal(got, want) {
				t.Errorf("requests %v, want %v", got, want)
			}
		})
	}
	f("half", func(c []byte) []byte { return c[:1000] }, "model.safetensors 1000-")
	f("all", func(c []byte) []byte { return c })
	f("too long", func(c []byte) []byte { return append(slices.Clone(c), 1) }, "model.safetensors")
	f("garbage", func(c []byte) []byte { return make([]byte, 1000) }, "model.safetensors", "model.safetensors 1000-")
}

func TestHubServerWithoutRanges(t *testing.T) {
	h := newFakeHub(t, modeltest.HFOptions{})
	h.hook = func(w http.ResponseWriter, r *http.Request, name string, content []byte) bool {
		if name == "model.safetensors" {
			if r.Header.Get("Range") == "" {
				return cut(w, r, content, 100_000)
			}
			w.Write(content)
			return true
		}
		return false
	}
	dir, err := get(t, h)
	if err != nil {
		t.Fatal(err)
	}
	whole(t, h, dir)
}

func TestHubWrongChecksum(t *testing.T) {
	h := newFakeHub(t, modeltest.HFOptions{})
	bad := "model.safetensors"
	h.hook = func(w http.ResponseWriter, r *http.Request, name string, content []byte) bool {
		if name != bad {
			return false
		}
		c := slices.Clone(content)
		c[len(c)/2] ^= 1
		w.Write(c)
		return true
	}
	for _, bad = range []string{"model.safetensors", "tokenizer.json"} {
		_, err := get(t, h)
		if err == nil || !strings.Contains(err.Error(), bad+": checksum") {
			t.Errorf("error %v", err)
		}
		if _, err := os.Stat(filepath.Join(h.repo(), "snapshots", commit1, bad)); err == nil {
			t.Errorf("%s is in the snapshot", bad)
		}
		if left, _ := filepath.Glob(filepath.Join(h.repo(), "blobs", h.sum(bad)+"*")); len(left) > 0 {
			t.Errorf("left over: %v", left)
		}
		os.RemoveAll(h.repo())
	}
}

// silence lets h send ten bytes of the weights and then nothing. It returns a
// channel that gets a value at each such point.
func silence(t *testing.T, h *fakeHub) <-chan struct{} {
	silent, release := make(chan struct{}, 100), make(chan struct{})
	t.Cleanup(func() { close(release) })
	h.hook = func(w http.ResponseWriter, r *http.Request, name string, content []byte) bool {
		if name != "model.safetensors" {
			return false
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(content)))
		w.Write(content[:10])
		w.(http.Flusher).Flush()
		silent <- struct{}{}
		h.mu.Unlock()
		defer h.mu.Lock()
		select {
		case <-r.Context().Done():
		case <-release:
		}
		return true
	}
	return silent
}

func TestHubStalls(t *testing.T) {
	h := newFakeHub(t, modeltest.HFOptions{})
	silence(t, h)
	if _, err := model.FetchFast(t.Context(), "hf:acme/tiny", h.options(), 20*time.Millisecond); err == nil || !strings.Contains(err.Error(), "no bytes arrived") {
		t.Errorf("silent server: %v", err)
	}
}

// TestHubSigned: an error does not show the query of a storage link, which is as good
// as a token.
func TestHubSigned(t *testing.T) {
	h := newFakeHub(t, modeltest.HFOptions{})
	h.storage.Close()
	_, err := get(t, h)
	if err == nil || !strings.Contains(err.Error(), h.storage.URL) || strings.Contains(err.Error(), "?") {
		t.Errorf("%v", err)
	}
}

func TestHubCancelled(t *testing.T) {
	h := newFakeHub(t, modeltest.HFOptions{})
	silent := silence(t, h)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		_, err := model.FetchFast(ctx, "hf:acme/tiny", h.options(), patience)
		done <- err
	}()
	<-silent
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestHubStatus(t *testing.T) {
	f := func(status int, want string) {
		t.Run(strconv.Itoa(status), func(t *testing.T) {
			h := newFakeHub(t, modeltest.HFOptions{})
			count := 0
			h.refuse = func(*http.Request) int { count++; return status }
			_, err := get(t, h)
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want one with %q", err, want)
			}
			if tries := map[bool]int{true: 6, false: 1}[status >= 500 || status == 429]; count != tries {
				t.Errorf("%d attempts, want %d", count, tries)
			}
		})
	}
	f(401, "does not accept HF_TOKEN")
	f(403, "accept its terms at http")
	f(404, "there is no acme/tiny")
	f(400, "400 Bad Request")
	f(500, "after 6 attempts: 500")
	f(429, "after 6 attempts: 429")

	h := newFakeHub(t, modeltest.HFOptions{})
	h.env["HF_TOKEN"] = ""
	if _, err := get(t, h); err == nil || !strings.Contains(err.Error(), "set HF_TOKEN") {
		t.Errorf("no token: %v", err)
	}
	h.env["HF_TOKEN"] = "secret"
	failures := 3
	h.refuse = func(*http.Request) int {
		if failures--; failures >= 0 {
			return 503
		}
		return 0
	}
	dir, err := get(t, h)
	if err != nil {
		t.Fatal(err)
	}
	whole(t, h, dir)
}

func TestHubRefuses(t *testing.T) {
	f := func(want string, change func(h *fakeHub)) {
		t.Run(want, func(t *testing.T) {
			h := newFakeHub(t, modeltest.HFOptions{Shards: 2})
			change(h)
			_, err := get(t, h)
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want one with %q", err, want)
			}
		})
	}
	f("no config.json", func(h *fakeHub) { delete(h.files, "config.json") })
	f("no .safetensors files", func(h *fakeHub) {
		h.files = map[string][]byte{"config.json": []byte("{}"), "pytorch_model.bin": nil}
	})
	f("such as \"tiny.gguf\"", func(h *fakeHub) {
		h.files = map[string][]byte{"config.json": []byte("{}"), "tiny.gguf": nil}
	})
	f("is not a plain .safetensors name", func(h *fakeHub) {
		h.files["model.safetensors.index.json"] = []byte(`{"weight_map":{"a":"../../../evil.safetensors"}}`)
	})
	f("ETag", func(h *fakeHub) { h.etag = func(string, string) string { return "../../evil" } })
	f("not a git commit", func(h *fakeHub) { h.commit = "../evil" })
	f("more than the stated", func(h *fakeHub) {
		h.hook = func(w http.ResponseWriter, _ *http.Request, name string, content []byte) bool {
			if name == "model-00001-of-00002.safetensors" {
				w.Write(append(slices.Clone(content), 1))
				return true
			}
			return false
		}
	})
	f("more than 10 redirects", func(h *fakeHub) {
		h.hook = func(w http.ResponseWriter, r *http.Request, name string, _ []byte) bool {
			http.Redirect(w, r, r.URL.String(), http.StatusFound)
			return true
		}
	})
}

func TestHubReferences(t *testing.T) {
	h := newFakeHub(t, modeltest.HFOptions{})
	for _, ref := range []string{"hf:", "hf:acme", "hf:acme/tiny/x", "hf:../tiny", "hf:acme/..", "hf:acme/a--b", "hf:acme/tiny@", "hf:acme/tiny@../x",
		"hf:acme/tiny@/x", "hf:acme/tiny@a//b", "hf:acme/tiny@a b", "hf:acme/tiny?x", "hf:-x/tiny"} {
		if _, err := model.FetchFast(t.Context(), ref, h.options(), patience); err == nil {
			t.Errorf("%s is accepted", ref)
		}
	}
	h.env["HF_ENDPOINT"] = "ftp://x"
	if _, err := get(t, h); err == nil || !strings.Contains(err.Error(), "HF_ENDPOINT") {
		t.Errorf("endpoint: %v", err)
	}
	if log := h.log(); len(log) > 0 {
		t.Errorf("requests %v", log)
	}
}

// TestHubTwoAtOnce: two downloads of the same model into one cache share one
// download of each file.
func TestHubTwoAtOnce(t *testing.T) {
	h := newFakeHub(t, modeltest.HFOptions{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if _, err := get(t, h); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	dir, err := get(t, h)
	if err != nil {
		t.Fatal(err)
	}
	whole(t, h, dir)
	if got, want := h.log(), []string{"chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"}; !slices.Equal(got, want) {
		t.Errorf("requests %v, want %v", got, want)
	}
}
