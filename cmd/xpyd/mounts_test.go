package main

import (
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/handover"
	"github.com/xpyd/xpyd/router"
)

// TestMounts: the router's table has what is mounted on it, and nothing else that is to be.
func TestMounts(t *testing.T) {
	mounts := (&scaler{}).mounts()
	maps.Copy(mounts, (&fleetSecret{}).mounts())
	mounts = newUpgrader(&handover.Place{}, nil, &upConfig{}, nil).mounts(mounts)
	got := slices.Sorted(maps.Keys(mounts))
	var want []string
	for _, r := range router.Routes() {
		if r.Mounted {
			want = append(want, r.Method+" "+r.Path)
		}
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("mounted are %q, the router knows of %q", got, want)
	}
}

// TestMountedBodies: a body that is not understood whole changes nothing, and the answer says what was
// sent and what is wanted.
func TestMountedBodies(t *testing.T) {
	mounts := (&scaler{}).mounts()
	maps.Copy(mounts, (&fleetSecret{}).mounts())
	mounts = newUpgrader(&handover.Place{}, nil, &upConfig{}, nil).mounts(mounts)
	const scale, retire, upgrade = "POST /admin/v1/scale", "POST /admin/v1/secret/retire", "POST /admin/v1/upgrade"
	for _, c := range []struct{ at, body, param, want string }{
		{scale, ``, "", "the body is empty: want a JSON object"},
		{scale, `[]`, "", "want a JSON object, not []"},
		{scale, `{}`, "", "how many workers?"},
		{scale, `{"decode":null}`, "", "how many workers?"},
		{scale, `{"prefill":"3"}`, "prefill", `prefill: want a whole number such as 3, not "3"`},
		{scale, `{"prefill":1.5}`, "prefill", "not 1.5"},
		{scale, `{"prefill":1e30}`, "prefill", "not 1e30"},
		{scale, `{"decode":1e9}`, "decode", "not 1e9"},
		{scale, `{"decode":3.0}`, "decode", "decode: want a whole number such as 3, not 3.0"},
		{scale, `{"decode":1000000000}`, "decode", "decode: 1000000000 is not in 1..64"},
		{scale, `{"prefill":0,"decode":1}`, "prefill", "prefill: 0 is not in 1..64"},
		{scale, `{"prefill":1}x`, "", "the body is no JSON object: invalid character 'x'"},
		{scale, `{"prefil":1}`, "prefil", `there is no key "prefil"`},
		{scale, `{"prefill":1}`, "", "still starting"},
		{retire, `{"forced":true}`, "forced", `there is no key "forced"`},
		{retire, `{"force":1}`, "force", "force: want true or false, not 1"},
		{upgrade, `{"timeout":5}`, "timeout", `there is no key "timeout"`},
		{upgrade, `{"timeout_ms":"5s"}`, "timeout_ms", `timeout_ms: want a whole number such as 3, not "5s"`},
	} {
		var ctx fasthttp.RequestCtx
		ctx.Request.SetBodyString(c.body)
		mounts[c.at](&ctx)
		var e struct {
			Error struct{ Message, Param string }
		}
		if err := json.Unmarshal(ctx.Response.Body(), &e); err != nil || ctx.Response.StatusCode() != 400 || e.Error.Param != c.param || !strings.Contains(e.Error.Message, c.want) {
			t.Errorf("%s %s: %d %s, want %s", c.at, c.body, ctx.Response.StatusCode(), ctx.Response.Body(), c.want)
		}
	}
}

// TestUpgradeSaid: a failed upgrade says that the old one goes on only if it does.
func TestUpgradeSaid(t *testing.T) {
	s := upgradeStatus{Phase: phaseFailed, From: "a", To: "b", Took: 0.6, Error: "not ready in 30s"}
	if got := s.String(); got != "upgrade from a to b: failed after 0.6 s, the old one goes on: not ready in 30s" {
		t.Errorf("%q", got)
	}
	s.Ends, s.Error = true, "the running one was stopped"
	if got := s.String(); got != "upgrade from a to b: given up after 0.6 s: the running one was stopped" {
		t.Errorf("%q", got)
	}
}

// TestUpgradeWatched: whoever watches an upgrade is told that the one to be upgraded has ended, not to look
// for it elsewhere.
func TestUpgradeWatched(t *testing.T) {
	t.Parallel()
	srv := httptest.NewServer(nil)
	srv.Close()
	cmd := newUp()
	cmd.SetContext(t.Context())
	cmd.SetErr(io.Discard)
	err := (&upgradeCommand{}).watch(cmd, &adminFlags{url: srv.URL, token: "x", data: t.TempDir()}, &upgradeStatus{Phase: phaseStarting})
	if err == nil || err.Error() != "the `xpyd up` that was to be upgraded has ended" {
		t.Error(err)
	}
}

// TestBinaryHangs: a binary that does not say its version is refused, and so is one whose child does not end.
func TestBinaryHangs(t *testing.T) {
	for name, text := range map[string]string{"itself": "exec sleep 100", "its child": "sleep 100", "a flood": "yes"} {
		path := filepath.Join(t.TempDir(), "xpyd")
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		if _, err := checkBinary(ctx, path); err == nil || !strings.Contains(err.Error(), "no answer within") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
