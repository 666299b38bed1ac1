package router_test

import (
	"crypto/sha256"
	"encoding/base64"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
)

// TestDashboard: the page needs the admin token, which a browser may send as a password
// where nothing is changed.
func TestDashboard(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	basic := func(password string) string {
		return "Basic " + base64.StdEncoding.EncodeToString([]byte("me:"+password))
	}
	f := func(verb, path, shown string, want int) (*http.Response, string) {
		t.Helper()
		req, _ := http.NewRequest(verb, g.admin+path, nil)
		if shown != "" {
			req.Header.Set("Authorization", shown)
		}
		resp, err := g.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		if resp.StatusCode != want {
			t.Errorf("%s %s with %q: %d %.200s", verb, path, shown, resp.StatusCode, body)
		}
		return resp, string(body)
	}
	for _, wrong := range []string{"", "Bearer wrong", basic("wrong"), basic(""), "Basic secret", "Basic " + base64.StdEncoding.EncodeToString([]byte("secret"))} {
		resp, body := f("GET", "/dashboard", wrong, 401)
		if how := resp.Header.Get("WWW-Authenticate"); !strings.HasPrefix(how, `Basic realm="xpyd: any name, and the admin token as password"`) {
			t.Errorf("asks for %q", how)
		}
		apiError(t, body)
	}
	if resp, _ := f("GET", "/admin/v1/instances", "", 401); resp.Header.Get("WWW-Authenticate") != "Bearer" {
		t.Error("other paths make browsers ask, too")
	}
	if resp, _ := f("GET", "/dashboard", "Bearer secret", 200); resp.Header.Get("Referrer-Policy") != "no-referrer" {
		t.Errorf("%v", resp.Header)
	}
	f("HEAD", "/dashboard", basic("secret"), 200)
	f("GET", "/admin/v1/instances", basic("secret"), 200)
	f("GET", "/debug/requests", basic("secret"), 200)
	for verb, paths := range map[string][]string{
		"POST":   {"/dashboard", "/admin/v1/instances", "/admin/v1/instances/d0/drain", "/admin/v1/profile"},
		"DELETE": {"/admin/v1/instances/d0"},
		"GET":    {"/debug/pprof/profile", "/admin/v1/profile", "/debug/ledger"},
	} {
		for _, path := range paths {
			f(verb, path, basic("secret"), 401)
		}
	}
	var list struct{ Instances []struct{ Draining bool } }
	g.adminJSON("GET", "/admin/v1/instances", "", &list)
	if len(list.Instances) != 2 || list.Instances[0].Draining {
		t.Errorf("a password changed the fleet: %+v", list)
	}

	resp, page := f("GET", "/dashboard", basic("secret"), 200)
	policy := resp.Header.Get("Content-Security-Policy")
	if !strings.HasPrefix(policy, "default-src 'none'; ") || strings.Contains(policy, "unsafe") {
		t.Errorf("policy %q", policy)
	}
	if got := resp.Header.Get("X-Content-Type-Options"); got != "nosniff" {
		t.Errorf("content type options %q", got)
	}
	for _, tag := range []string{"script", "style"} {
		all := regexp.MustCompile(`(?s)<`+tag+`>(.*?)</`+tag+`>`).FindAllStringSubmatch(page, -1)
		if len(all) != 1 {
			t.Fatalf("%d of %s", len(all), tag)
		}
		sum := sha256.Sum256([]byte(all[0][1]))
		if want := tag + "-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "';"; !strings.Contains(policy, want) {
			t.Errorf("%q is not in %q", want, policy)
		}
	}
	for _, foreign := range []string{`https?:`, `\bsrc=`, `href=`, `url\(`, `@import`, `innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b`, `<[^>]* (style|on\w+)=`} {
		if at := regexp.MustCompile(foreign).FindString(page); at != "" {
			t.Errorf("the page has %q", at)
		}
	}
}
