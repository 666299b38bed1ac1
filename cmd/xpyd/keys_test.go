package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/router/apikey"
)

// TestKeysExample: the example in configs is understood.
func TestKeysExample(t *testing.T) {
	keys, err := apikey.Read("../../configs/keys.yaml")
	if err != nil || len(keys) != 2 {
		t.Fatal(keys, err)
	}
	if k := apikey.NewRing(keys).Find([]byte("sk-xpyd-example")); k == nil || k.Name != "team-a" || !keys[1].NamesTenants {
		t.Errorf("%+v", k)
	}
}

func TestKeys(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys.yaml")
	out, errs, code := xpyd(t, "keys", "new", "--file", file, "--name", "team-a", "--tokens-per-minute", "1000", "--models", "a,b*", "--expires", "720h", "--ttft-promise", "200ms", "--tpot-promise", "25ms", "--itl-promise", "50ms")
	secret := strings.TrimSpace(out)
	if code != exitDone || !strings.HasPrefix(secret, apikey.Prefix) || errs != "" {
		t.Fatalf("%d %q %q", code, out, errs)
	}
	text, err := os.ReadFile(file)
	if err != nil || strings.Contains(string(text), secret) {
		t.Errorf("%s %v", text, err)
	}
	keys, err := apikey.Load(file)
	if err != nil || len(keys) != 1 {
		t.Fatal(keys, err)
	}
	if k := apikey.NewRing(keys).Find([]byte(secret)); k == nil || k.Name != "team-a" || k.TokensPerMinute != 1000 || len(k.Models) != 2 || k.Expires.IsZero() ||
		k.TTFTPromise != 200*time.Millisecond || k.TPOTPromise != 25*time.Millisecond || k.ITLPromise != 50*time.Millisecond {
		t.Errorf("%+v", k)
	}
	if out, _, code := xpyd(t, "keys", "list", "--file", file); code != exitDone || !strings.Contains(out, "team-a") {
		t.Errorf("%d %q", code, out)
	}
	f := func(want int, message string, args ...string) {
		t.Helper()
		_, errs, code := xpyd(t, append([]string{"keys"}, args...)...)
		if code != want || !strings.Contains(errs, message) {
			t.Errorf("%v: %d %q", args, code, errs)
		}
	}
	f(exitDone, "")
	f(exitUsage, "--file", "new", "--name", "x")
	f(exitUsage, "name:", "new", "--file", file)
	f(exitUsage, "priority:", "new", "--file", file, "--name", "x", "--priority", "urgent")
	f(exitUsage, "ttft_promise:", "new", "--file", file, "--name", "x", "--ttft-promise", "-1s")
	f(exitUsage, "--expires", "new", "--file", file, "--name", "x", "--expires", "soon")
	for _, past := range []string{"-5h", "0s", "2020-01-01T00:00:00Z"} {
		f(exitUsage, `--expires: "`+past+`" is not in the future`, "new", "--file", file, "--name", "x", "--expires", past)
	}
	f(exitUsage, "", "new", "extra")
	f(exitFailed, "twice", "new", "--file", file, "--name", "team-a")
	f(exitUsage, "no such file", "list", "--file", file+"x")
}
