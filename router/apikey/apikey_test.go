package apikey_test

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/router/apikey"
	"github.com/xpyd/xpyd/router/limit"
)

func file(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestFind(t *testing.T) {
	var keys []apikey.Key
	var secrets []string
	for _, name := range []string{"a", "b", "c"} {
		s, k := apikey.New(name)
		if !strings.HasPrefix(s, apikey.Prefix) || len(s) != len(apikey.Prefix)+43 {
			t.Errorf("%q", s)
		}
		keys, secrets = append(keys, k), append(secrets, s)
	}
	r := apikey.NewRing(append(keys, apikey.Plain("d", "plain")))
	for i, s := range secrets {
		if k := r.Find([]byte(s)); k == nil || k.Name != keys[i].Name {
			t.Errorf("%d: %+v", i, k)
		}
		if k := r.Find([]byte(s + "x")); k != nil {
			t.Errorf("%d: %+v", i, k)
		}
	}
	if k := r.Find([]byte("plain")); k == nil || k.Name != "d" || k.Class() != limit.High {
		t.Errorf("%+v", k)
	}
	if r.Find(nil) != nil {
		t.Error("no key is a key")
	}
}

func TestLoad(t *testing.T) {
	hash := func(s string) string {
		b := sha256.Sum256([]byte(s))
		return hex.EncodeToString(b[:])
	}
	keys, err := apikey.Load(file(t, `
keys:
- name: team-a
  sha256: `+hash("one")+`
  requests_per_minute: 60
  tokens_per_minute: 10000
  max_in_flight: 4
  weight: 2.5
  priority: low
  ttft_promise: 200ms
  tpot_promise: 25ms
  itl_promise: 50ms
  cache: team
  models: [llama, "qwen-*"]
  names_tenants: true
  expires: 2030-01-02T03:04:05Z
- {name: team-b, sha256: `+strings.ToUpper(hash("two"))+`}
`))
	if err != nil || len(keys) != 2 {
		t.Fatal(keys, err)
	}
	a, b := apikey.NewRing(keys).Find([]byte("one")), apikey.NewRing(keys).Find([]byte("two"))
	if a.Name != "team-a" || a.Rates() != (limit.Rates{Requests: 60, Tokens: 10000, InFlight: 4}) || a.Weight != 2.5 || a.Class() != limit.Low ||
		a.TTFTPromise != 200*time.Millisecond || a.TPOTPromise != 25*time.Millisecond || a.ITLPromise != 50*time.Millisecond || b.TTFTPromise+b.TPOTPromise+b.ITLPromise != 0 || !a.NamesTenants || !a.May("llama") || !a.May("qwen-3") || a.May("llama-2") || a.May("") {
		t.Errorf("%+v", a)
	}
	if at := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC); a.Expired(at.Add(-1)) || !a.Expired(at) || b.Expired(at) {
		t.Error("expiry")
	}
	if b.Name != "team-b" || b.Class() != limit.Normal || !b.May("any") || b.Rates().Limits() {
		t.Errorf("%+v", b)
	}

	open := apikey.Key{Name: "c", Cache: apikey.CacheShared}
	if a.CacheName() != "team" || b.CacheName() != "team-b" || open.CacheName() != "" {
		t.Errorf("caches %q, %q, %q", a.CacheName(), b.CacheName(), open.CacheName())
	}

	f := func(text, want string) {
		t.Helper()
		path := file(t, text)
		_, err := apikey.Load(path)
		if err == nil || !strings.HasPrefix(err.Error(), path+":"+want) {
			t.Errorf("%q: %v", text, err)
		}
	}
	item := "keys:\n- name: a\n  sha256: " + hash("x") + "\n"
	f("keys:\n- name: a b\n  sha256: "+hash("x"), `2: keys[0].name: "a b" is not`)
	f("keys:\n- name: a\n  sha256: abc\n", `3: keys[0].sha256: want the 64`)
	f("keys:\n- name: a\n", `2: keys[0].sha256: want the 64`)
	f(item+"  limit: 3\n", `4: keys[0].limit: unknown key`)
	f(item+"  requests_per_minute: -1\n", `4: keys[0].requests_per_minute: -1 is below 0`)
	f(item+"  tokens_per_minute: many\n", `4: keys[0].tokens_per_minute: "many"`)
	f(item+"  max_in_flight: -1\n", `4: keys[0].max_in_flight: -1`)
	f(item+"  weight: 1e9\n", `4: keys[0].weight: `)
	f(item+"  ttft_promise: -1s\n", `4: keys[0].ttft_promise: -1s is not 0, nor within 1ms and 1h`)
	f(item+"  ttft_promise: 1h1s\n", `4: keys[0].ttft_promise: 1h0m1s is not`)
	f(item+"  tpot_promise: 999us\n", `4: keys[0].tpot_promise: 999`)
	f(item+"  tpot_promise: 25\n", `4: keys[0].tpot_promise: `)
	f(item+"  itl_promise: 999us\n", `4: keys[0].itl_promise: 999`)
	f(item+"  cache: a b\n", `4: keys[0].cache: "a b" is not of 1 to 64`)
	f(item+"  priority: urgent\n", `4: keys[0].priority: "urgent" is not`)
	f(item+"  expires: soon\n", `4: keys[0].expires: `)
	f(item+"- name: a\n  sha256: "+hash("y")+"\n", `4: keys[1].name: "a" is there twice`)
	f(item+"- name: b\n  sha256: "+hash("x")+"\n", `5: keys[1].sha256: "a" and "b" have the same key`)
	for _, text := range []string{"", "# nobody\n", "keys:\n", "{}"} {
		f(text, " it has no keys")
	}
	if keys, err := apikey.Load(file(t, "keys: []")); err != nil || len(keys) != 0 {
		t.Error(keys, err) // said so
	}
	if _, err := apikey.Load("/nowhere"); err == nil {
		t.Error("no file")
	}
}

func TestAppend(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys.yaml")
	add := func(k apikey.Key) error { return apikey.Append(path, k) }
	s1, k1 := apikey.New("one")
	k1.RequestsPerMinute, k1.TokensPerMinute, k1.MaxInFlight, k1.Weight = 1, 2, 3, 0.5
	k1.Priority, k1.Models, k1.Expires = "high", []string{"a", "b*"}, time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	k1.TTFTPromise, k1.TPOTPromise, k1.ITLPromise = 1500*time.Millisecond, 25*time.Millisecond, 50*time.Millisecond
	k1.Cache = "team"
	s2, k2 := apikey.New("two")
	for _, k := range []apikey.Key{k1, k2} {
		if err := add(k); err != nil {
			t.Fatal(err)
		}
	}
	if err := add(k1); err == nil || !strings.Contains(err.Error(), path+":") || !strings.Contains(err.Error(), "twice") {
		t.Errorf("%v", err)
	}
	text, err := os.ReadFile(path)
	if err != nil || strings.Contains(string(text), s1) || strings.Contains(string(text), s2) {
		t.Errorf("%s %v", text, err)
	}
	keys, err := apikey.Load(path)
	if err != nil || len(keys) != 2 {
		t.Fatal(keys, err)
	}
	got := *apikey.NewRing(keys).Find([]byte(s1))
	if got.Rates() != k1.Rates() || got.Weight != 0.5 || got.Cache != "team" || got.TTFTPromise != k1.TTFTPromise || got.TPOTPromise != k1.TPOTPromise || got.ITLPromise != k1.ITLPromise || got.Class() != limit.High || len(got.Models) != 2 || !got.Expires.Equal(k1.Expires) {
		t.Errorf("%+v", got)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info.Mode(), err)
	}
	if err := os.WriteFile(path, append(text, "extra: 1\n"...), 0o640); err != nil {
		t.Fatal(err)
	}
	_, k3 := apikey.New("three")
	if err := add(k3); err == nil {
		t.Error("added behind something else")
	}
	if left, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".keys-*")); err != nil || len(left) != 0 {
		t.Error(left, err)
	}
}

// TestWhoseFile: keys are read from a file that only this user or root can change, also through a
// link, and a pipe without a writer is not waited for.
func TestWhoseFile(t *testing.T) {
	f := func(path, want string) {
		t.Helper()
		_, err := apikey.Load(path)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), path+want)) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	path := file(t, "keys: []")
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	for mode, want := range map[os.FileMode]string{0o400: "", 0o600: "", 0o644: "", 0o664: " has mode 0664", 0o666: " has mode 0666, so that others may change it: run `chmod go-w ", 0o602: " has mode 0602"} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		f(path, want)
		f(link, want)
		if _, err := apikey.Read(path); err != nil {
			t.Error(err)
		}
	}
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		for uid, want := range map[int]string{12345: " belongs to uid 12345, ", 0: ""} {
			if err := os.Chown(path, uid, 0); err != nil {
				t.Fatal(err)
			}
			f(link, want)
		}
	}
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	f(pipe, " is not a regular file")
	f(filepath.Dir(pipe), " is not a regular file")
	if _, err := apikey.Read(pipe); err == nil {
		t.Error("a pipe was read")
	}
}
