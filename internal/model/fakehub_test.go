package model_test

import (
	"crypto/sha1"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/modeltest"
)

const (
	commit1 = "1111111111111111111111111111111111111111"
	commit2 = "2222222222222222222222222222222222222222"
)

// fakeHub serves one repository, acme/tiny, as the hub does: weights behind a
// redirect to a storage host with their SHA-256, the rest directly with git's
// blob id.
type fakeHub struct {
	hub, storage *httptest.Server
	env          map[string]string

	mu       sync.Mutex
	commit   string
	files    map[string][]byte
	requests []string // "GET tokenizer.json 100-", without HEADs

	// hook, when set, may answer a request for a file's content itself.
	hook func(w http.ResponseWriter, r *http.Request, name string, content []byte) bool
	// refuse, when set, is the status of every response of the hub.
	refuse func(r *http.Request) int
	etag   func(name, etag string) string
}

func newFakeHub(t *testing.T, o modeltest.HFOptions) *fakeHub {
	t.Helper()
	h := &fakeHub{commit: commit1, files: map[string][]byte{}, etag: func(_, e string) string { return e }}
	o.Files = map[string][]byte{"tokenizer.json": []byte(`{"fake":true}`), "chat_template.jinja": []byte("{{ messages }}")}
	dir := writeHF(t, modeltest.Tiny("llama"), o)
	names, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		if h.files[n.Name()], err = os.ReadFile(filepath.Join(dir, n.Name())); err != nil {
			t.Fatal(err)
		}
	}
	h.files["README.md"], h.files["onnx/model.onnx"] = []byte("read"), []byte("not wanted")
	h.hub = httptest.NewServer(http.HandlerFunc(h.serveHub))
	h.storage = httptest.NewServer(http.HandlerFunc(h.serveStorage))
	t.Cleanup(h.hub.Close)
	t.Cleanup(h.storage.Close)
	h.env = map[string]string{"HF_ENDPOINT": h.hub.URL, "HF_HOME": t.TempDir(), "HF_TOKEN": "secret"}
	return h
}

func (h *fakeHub) options() model.Options {
	return model.Options{Getenv: func(k string) string { return h.env[k] }, HTTP: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
}

// repo is the repository's folder in the cache.
func (h *fakeHub) repo() string {
	return filepath.Join(h.env["HF_HOME"], "hub", "models--acme--tiny")
}

func (h *fakeHub) sum(name string) string {
	if strings.HasSuffix(name, ".safetensors") {
		s := sha256.Sum256(h.files[name])
		return hex.EncodeToString(s[:])
	}
	s := sha1.Sum(append(fmt.Appendf(nil, "blob %d\x00", len(h.files[name])), h.files[name]...))
	return hex.EncodeToString(s[:])
}

func (h *fakeHub) serveHub(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.refuse != nil {
		if status := h.refuse(r); status != 0 {
			w.WriteHeader(status)
			return
		}
	}
	if r.Header.Get("Authorization") != "Bearer secret" {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	if r.URL.EscapedPath() == "/api/models/acme/tiny/revision/main" || r.URL.EscapedPath() == "/api/models/acme/tiny/revision/refs%2Fpr%2F1" {
		list := []map[string]string{}
		for _, n := range slices.Sorted(maps.Keys(h.files)) {
			list = append(list, map[string]string{"rfilename": n})
		}
		json.NewEncoder(w).Encode(map[string]any{"sha": h.commit, "siblings": list})
		return
	}
	name, ok := strings.CutPrefix(r.URL.Path, "/acme/tiny/resolve/"+h.commit+"/")
	content, there := h.files[name]
	if !ok || !there {
		w.Header().Set("X-Error-Code", "RevisionNotFound")
		w.WriteHeader(http.StatusNotFound)
		return
	}
	tag := h.etag(name, h.sum(name))
	if strings.HasSuffix(name, ".safetensors") {
		w.Header().Set("X-Linked-Etag", `"`+tag+`"`)
		w.Header().Set("X-Linked-Size", strconv.Itoa(len(content)))
		http.Redirect(w, r, h.storage.URL+"/"+name+"?signature=x", http.StatusFound)
		return
	}
	w.Header().Set("Etag", `W/"`+tag+`"`)
	h.content(w, r, name, content)
}

func (h *fakeHub) serveStorage(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if r.Header.Get("Authorization") != "" || r.Method != http.MethodGet || r.URL.RawQuery != "signature=x" {
		w.WriteHeader(http.StatusTeapot) // the token must stay at the hub
		return
	}
	name := r.URL.Path[1:]
	w.Header().Set("Etag", `"storage-etag"`)
	h.content(w, r, name, h.files[name])
}

func (h *fakeHub) content(w http.ResponseWriter, r *http.Request, name string, content []byte) {
	if r.Method == http.MethodHead {
		w.Header().Set("Content-Length", strconv.Itoa(len(content)))
		return
	}
	from := 0
	if v := r.Header.Get("Range"); v != "" {
		fmt.Sscanf(v, "bytes=%d-", &from)
	}
	h.requests = append(h.requests, strings.TrimSpace(fmt.Sprintf("%s %s", name, strings.TrimPrefix(r.Header.Get("Range"), "bytes="))))
	if h.hook != nil && h.hook(w, r, name, content) {
		return
	}
	if from > 0 {
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(content)-1, len(content)))
		w.Header().Set("Content-Length", strconv.Itoa(len(content)-from))
		w.WriteHeader(http.StatusPartialContent)
	}
	w.Write(content[from:])
}

// log returns and forgets the requests for content, sorted.
func (h *fakeHub) log() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := h.requests
	h.requests = nil
	slices.Sort(out)
	return out
}
