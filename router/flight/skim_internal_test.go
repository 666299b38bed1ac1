package flight

import (
	"bytes"
	"encoding/json"
	"mime/multipart"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/jsonscan"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/limit"
)

func TestSkim(t *testing.T) {
	f := func(in, model, link string) {
		t.Helper()
		for _, step := range []int{1, 3, len(in) + 1} {
			s := &skim{}
			for i := 0; i < len(in); i += step {
				s.read([]byte(in[i:min(i+step, len(in))]))
			}
			if s.model != model || s.link != link {
				t.Errorf("%s by %d: %q %q", in, step, s.model, s.link)
			}
		}
	}
	f(`{"model":"m"}`, "m", "")
	f(` { "a" : {"model":"x","bootstrap_room":1}, "model" : "m" }`, "m", "")
	f(`{"a":["model","x"],"b":"model","model":"m"}`, "m", "")
	f(`{"a":"\",\"model\":\"x","model":"m\u00e9\\"}`, `mé\`, "")
	f(`{"mod\u0065l":"m","kv_transfer\u005fparams":null}`, "m", "kv_transfer_params")
	f(`["model","m"]`, "", "")
	f(`{"model":3,"x":"y"}`, "", "")
	f(`{"model":{"a":"b"},"c":"d"}`, "", "")
	f(`{"model":"m`, "", "")
	f(`{"bootstrap_pair_key":1}`, "", "bootstrap_*")
	for _, name := range []string{"kv_transfer_params", "disaggregated_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"} {
		f(`{"`+name+`":1}`, "", name)
		if top, err := openai.Scan([]byte(`{"` + name + `":{}}`)); err != nil || top.Link != name {
			t.Errorf("%s: %q %v", name, top.Link, err)
		}
	}
}

// FuzzSkim: skim reads valid JSON as encoding/json does.
func FuzzSkim(f *testing.F) {
	f.Add([]byte(`{"model":"m","x":[{"model":"y"}],"bootstrap_port":1}`))
	f.Add([]byte(`{"model":"a\"\u0041","model":"b"}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		s := &skim{}
		s.read(in)
		var v map[string]json.RawMessage
		if json.Unmarshal(in, &v) != nil || len(in) > maxToken {
			return
		}
		if err := s.scan.Err(); err != nil { // what encoding/json takes beside: lone surrogates, invalid UTF-8, depth
			return
		}
		linked := false
		for name := range v {
			linked = linked || openai.LinkField([]byte(name)) != ""
		}
		if linked != (s.link != "") {
			t.Fatalf("%q: link %q", in, s.link)
		}
		var model string
		if json.Unmarshal(v["model"], &model) == nil && s.model != model && v["model"][0] == '"' {
			t.Fatalf("%q: model %q, want %q", in, s.model, model)
		}
	})
}

// TestSkimURLs: the same addresses as openai.Scan finds, in any pieces.
func TestSkimURLs(t *testing.T) {
	f := func(body string, want ...string) {
		t.Helper()
		for size := range 7 {
			s := &skim{}
			for rest := []byte(body); len(rest) > 0; {
				n := min(size+1, len(rest))
				s.read(rest[:n])
				rest = rest[n:]
			}
			if !slices.Equal(s.urls, want) {
				t.Errorf("%s in pieces of %d: %q", body, size+1, s.urls)
			}
		}
	}
	f(`{"model":"m","input":[{"type":"input_image","image_url":"http://h"},{"file_url":"http://i"}]}`, "http://h", "http://i")
	f(`{"messages":[{"content":[{"image_\u0075rl":{"\u0075rl":"http:\/\/h"}}]}]}`, "http://h")
	f(`{"url":"http://h","a":[1,{"b":2},"url"],"c":{"d":{"url" : "x"}}}`, "http://h", "x")
	f(`{"input":[{"image_url":"data:image/png;base64,` + strings.Repeat("A", 2*maxToken) + `"}]}`)
	f(`{"metadata":{"url":"http://h"},"tools":[{"url":"http://h","server_url":"http://s"}],"input":"url"}`, "http://s")
	f(`{"input":[{"url":null},{"url":{"x":"y"}},{"curl":"http://h"}]}`)
	f(`{"input":{"url":"`+strings.Repeat("h", 2*maxToken)+`"}}`, strings.Repeat("h", maxToken))
	deep := strings.Repeat(`{"a":`, jsonscan.MaxDepth-2) + `{"url":"x"}` + strings.Repeat("}", jsonscan.MaxDepth-2)
	f(`{"q":`+deep+`,"url":"http://h"}`, "x", "http://h")
	f(`{"q":[` + deep + `],"url":"http://h"}`) // and is refused
	for text, want := range map[string]string{
		`{"q":[` + deep + `],"url":"http://h"}`:         "nested deeper than 64 levels",
		`}}]]{"model":"m","kv_transfer_params":1}`:      "unexpected character at byte 0",
		`{"x":NaN,"kv_transfer_params":1}`:              "unexpected character at byte 5",
		"{\"x\":\"\xed\xa0\x80\",\"url\":\"http://h\"}": "not valid UTF-8",
	} {
		s := &skim{}
		if s.read([]byte(text)); s.scan.Err() == nil || s.scan.Err().Error() != want {
			t.Errorf("%s: %v", text, s.scan.Err())
		}
	}
}

// TestSkimTwice: parsers take the last of several models, so there may be one.
func TestSkimTwice(t *testing.T) {
	f := func(in, settled string, want bool) {
		t.Helper()
		for _, step := range []int{1, 3, len(in) + 1} {
			s := &skim{model: settled}
			for i := 0; i < len(in); i += step {
				s.read([]byte(in[i:min(i+step, len(in))]))
			}
			if s.twice != want {
				t.Errorf("%s behind %q by %d: %v", in, settled, step, s.twice)
			}
		}
	}
	f(`{"model":"m","x":{"model":"y"}}`, "", false)
	f(`{"model":"m","mod\u0065l":"y"}`, "", true)
	f(`{"model":"m","model":null}`, "", true)
	f(`{"model":"m"}`, "m", false)
	f(`{"model":"y"}`, "m", true)
	f(`{"model":"`+strings.Repeat("y", 2*maxToken)+`"}`, "m", true)
}

// TestForm: the model is found in a form however it is cut into pieces.
func TestForm(t *testing.T) {
	f := func(in, settled, model string, twice bool) {
		t.Helper()
		in = strings.ReplaceAll(in, "\n", "\r\n")
		for _, step := range []int{1, 3, 10, len(in) + 1} {
			s := newForm("Multipart/Form-Data; boundary=B")
			s.model = settled
			for i := 0; i < len(in); i += step {
				s.read([]byte(in[i:min(i+step, len(in))]))
			}
			if s.model != model || s.twice != twice || s.broken != "" {
				t.Errorf("%q behind %q by %d: %q %v %s", in, settled, step, s.model, s.twice, s.broken)
			}
		}
	}
	const head = "--B\nContent-Disposition: form-data; name="
	sound := head + "file; filename=\"model\"\nContent-Type: audio/wav\n\n" + strings.Repeat("model\n\x00", 999) + "\n"
	f(head+"\"model\"\n\nm\n"+sound+"--B--", "", "m", false)
	f(sound+head+"model\nX: y\n\nm\n--B--\n", "", "m", false)
	f(sound+head+"model\n\nm\n--B--\n", "m", "m", false)
	f(sound+head+"model\n\ny\n--B--\n", "m", "y", true)
	f(head+"model\n\nm\n"+sound+head+"model\n\nm\n--B--\n", "", "m", true)
	f(strings.Repeat(head+"x\n\n\n", 99)+"--B\ncontent-disposition: x; name*=utf-8''mod%65l\n\nm\n--B--\n", "", "m", false)
	f(head+"model\n--B-x: y\n\nm\n--B--\n", "", "m", false)
	f(head+"model; name=x\n\nm\n--B--\n", "", "", true)
	f("no form", "", "", false)
	f(head+"model\n\nm", "", "", false)
	for _, kind := range []string{"", "application/json", "multipart/form-data, application/json", "multipart/mixed; boundary=B"} {
		if newForm(kind) != nil {
			t.Errorf("%q is a form", kind)
		}
	}
}

// TestFormFetch: every field that an engine would fetch is held against
// media_hosts, and a form that engines may read in another way is refused.
func TestFormFetch(t *testing.T) {
	f := func(kind, in, param, want string) {
		t.Helper()
		for _, step := range []int{1, 7, len(in) + 1} {
			s, got, message := newForm(kind), "", ""
			for i := 0; i < len(in); i += step {
				s.read([]byte(in[i:min(i+step, len(in))]))
				if err := s.refusal(hosts{"img.example"}); err != nil {
					got, message = err.Param, err.Message
					break
				}
			}
			if got != param || !strings.Contains(message, want) || message != "" && want == "" {
				t.Errorf("%q by %d: %q %q, want %q %q", in, step, got, message, param, want)
			}
		}
	}
	const kind, allowed = "multipart/form-data; boundary=B", "not in the router's media_hosts"
	part := func(head, value string) string {
		return "--B\r\nContent-Disposition: form-data; " + head + "\r\n\r\n" + value + "\r\n--B--\r\n"
	}
	for _, name := range []string{`name=url`, `name="image_url"`, `name="url[]"`, `name="IMAGE_URL[0]"`, `name=image`, `name="mask"; filename="a.png"`, `name*=utf-8''ur%6c`,
		`name="prompt"; name*=utf-8''image`} {
		f(kind, part(name, "http://169.254.169.254/latest"), strings.NewReplacer(`name*=utf-8''ur%6c`, "url", `name="prompt"; name*=utf-8''image`, "image",
			`; filename="a.png"`, "", "name=", "", `"`, "").Replace(name), allowed)
	}
	f(kind, part("name=image", " \n\tHTTPS://evil.example/x"), "image", allowed)
	f(kind, part("name=image", "http://evil.example/"+strings.Repeat("x", 3*maxToken)), "image", allowed)
	f(kind, part("name=image", "file:/etc/passwd"), "image", "no http or https address")
	f(kind, part("name=url", "/etc/passwd"), "url", "no http or https address")
	f(kind, part("name=url", "https://img.example/1.png"), "", "")
	f(kind, part("name=url", "data:image/png;base64,AAAA"), "", "")
	f(kind, part("name=image", "\x89PNG\r\n\x1a\nhttp://evil.example"), "", "")
	f(kind, part("name=prompt", "http://evil.example/ is what the sign says"), "", "")
	f(kind, part("name=x", "time: 10:/20"), "", "")
	f(kind, part("name=url\r\nContent-Transfer-Encoding: base64", "aHR0cDovL2V2aWwuZXhhbXBsZQ=="), "", "malformed form: Content-Transfer-Encoding base64")
	f(kind, part("name=file\r\nContent-Transfer-Encoding: binary", "x"), "", "")
	f(kind, "--B\r\nX: a\n\nContent-Disposition: form-data; name=url\r\n\r\nhttp://evil.example\r\n--B--\r\n", "", "CR LF")
	f(kind+"; charset=utf-16", part("name=url", "x"), "", "malformed form: charset utf-16")
	f(kind+"; charset=UTF-8", part("name=x", "x"), "", "")
}

// FuzzForm: no field that mime/multipart calls model is missed.
func FuzzForm(f *testing.F) {
	f.Add([]byte("--B\r\nContent-Disposition: form-data; name=model\r\n\r\nm\r\n--B--"))
	f.Fuzz(func(t *testing.T, in []byte) {
		ours := newForm("multipart/form-data; boundary=B")
		ours.read(in)
		for r := multipart.NewReader(bytes.NewReader(in), "B"); ; {
			part, err := r.NextRawPart()
			if err != nil {
				return
			}
			if len(in) < maxToken && part.FormName() == "model" && !ours.named && !ours.twice && ours.broken == "" {
				t.Fatalf("%q", in)
			}
		}
	})
}

// TestSkimPriority: a priority above the key's best is found, and overwritten at the same
// length.
func TestSkimPriority(t *testing.T) {
	f := func(in string, best limit.Class, want string) {
		t.Helper()
		for _, step := range []int{1, 3, len(in) + 1} {
			u, out := &upload{skim: skim{best: best}}, []byte(in)
			for i := 0; i < len(in); i += step {
				if err := u.look(out[i:min(i+step, len(in))]); err != nil {
					t.Fatal(err)
				}
			}
			if string(out) != want || !json.Valid(out) {
				t.Errorf("%s by %d: %s, want %s", in, step, out, want)
			}
		}
	}
	f(`{"priority":-5}`, limit.High, `{"priority":-5}`)
	f(`{"priority":-5}`, limit.Normal, `{"priority": 0}`)
	f(`{"prior\u0069ty" : -12.5e1 ,"priority":7}`, limit.Normal, `{"prior\u0069ty" :  0      ,"priority":7}`)
	f(`{"priority":0,"x":{"priority":-1},"y":-1}`, limit.Low, `{"priority":1,"x":{"priority":-1},"y":-1}`)
	f(`{"priority":null,"priority":[-1]}`, limit.Low, `{"priority":null,"priority":[-1]}`)
}
