package mock

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Legs.
const (
	legPrefill = "prefill"
	legDecode  = "decode"
	legPlain   = "plain"
)

// sight is what check recognised in a request.
type sight struct {
	leg    string
	links  []string // one per prompt
	peer   string   // at decode: where prefill is
	engine string   // at decode: the expected engine id of prefill
	disagg string   // TensorRT-LLM's id
}

type fieldsOf map[string]json.RawMessage

// has reports whether a field is present and not null.
func (f fieldsOf) has(name string) bool { return f[name] != nil && string(f[name]) != "null" }

// needs wants the field present.
func (f fieldsOf) needs(name string) error {
	if !f.has(name) {
		return fmt.Errorf("%s is absent", name)
	}
	return nil
}

// is wants the field to have one of these raw values.
func (f fieldsOf) is(name string, want ...string) error {
	if !slices.Contains(want, string(f[name])) {
		return fmt.Errorf("%s is %s, want %s", name, shown(f[name]), strings.Join(want, " or "))
	}
	return nil
}

// none wants the fields absent.
func (f fieldsOf) none(names ...string) error {
	for _, n := range names {
		if f[n] != nil {
			return fmt.Errorf("%s is %s, want it absent", n, f[n])
		}
	}
	return nil
}

// only wants exactly these fields.
func (f fieldsOf) only(names ...string) error {
	got := slices.Sorted(maps.Keys(f))
	slices.Sort(names)
	if !slices.Equal(got, names) {
		return fmt.Errorf("the fields are %v, want %v", got, names)
	}
	return nil
}

func (f fieldsOf) text(name string) (string, error) {
	var s string
	if err := json.Unmarshal(f[name], &s); err != nil || s == "" {
		return "", fmt.Errorf("%s is %s, want a string", name, shown(f[name]))
	}
	return s, nil
}

func (f fieldsOf) object(name string) (fieldsOf, error) {
	var o fieldsOf
	if err := json.Unmarshal(f[name], &o); err != nil || o == nil {
		return nil, fmt.Errorf("%s is %s, want an object", name, shown(f[name]))
	}
	return o, nil
}

func (f fieldsOf) hostPort(host, port string) (string, error) {
	h, err := f.text(host)
	if err != nil {
		return "", err
	}
	n, err := strconv.ParseUint(string(f[port]), 10, 16)
	if err != nil || n == 0 {
		return "", fmt.Errorf("%s is %s, want a port", port, shown(f[port]))
	}
	return net.JoinHostPort(h, strconv.FormatUint(n, 10)), nil
}

func shown(raw json.RawMessage) string {
	if raw == nil {
		return "absent"
	}
	return string(raw)
}

// oneToken checks a request to vLLM's prefill.
func oneToken(f fieldsOf) error {
	err := cmp.Or(f.is("stream", "false"), f.is("max_tokens", "1"), f.none("stream_options", "min_tokens", "min_completion_tokens"))
	if err == nil && f["max_completion_tokens"] != nil {
		err = f.is("max_completion_tokens", "1")
	}
	return err
}

// check recognises the leg of a request, and refuses wrong fields.
func (e *Engine) check(h http.Header, f fieldsOf) (s sight, err error) {
	switch d := e.cfg.Dialect; {
	case Alone(d):
		s.leg = legPlain
		err = f.none("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "disaggregated_params")
	case d == "storage":
		s.leg = e.cfg.Role
		if s.leg == legPrefill {
			err = cmp.Or(oneToken(f), f.none("kv_transfer_params"))
		}
	case d == "vllm-p2pnccl":
		s, err = e.checkNccl(h, f)
	case d == "sglang":
		s, err = e.checkSGLang(f)
	case d == "trtllm", d == "trtllm-generation-first":
		s, err = e.checkTRT(f)
	default:
		s, err = e.checkVLLM(h, f)
	}
	if err == nil && e.cfg.Role != "both" && s.leg != e.cfg.Role && !(s.leg == legPlain && e.cfg.Role == legDecode) {
		err = fmt.Errorf("a %s leg came to a %s engine", s.leg, e.cfg.Role)
	}
	return s, err
}

func (e *Engine) checkVLLM(h http.Header, f fieldsOf) (sight, error) {
	if !f.has("kv_transfer_params") {
		return sight{leg: legPlain}, nil
	}
	id := h.Get("X-Request-Id")
	if id == "" {
		return sight{}, fmt.Errorf("X-Request-Id is absent")
	}
	p, err := f.object("kv_transfer_params")
	if err != nil {
		return sight{}, err
	}
	if e.cfg.Dialect == "vllm-offloading" {
		return checkOffloading(f, p)
	}
	if string(p["do_remote_decode"]) == "true" {
		s := sight{leg: legPrefill, links: []string{id}}
		if e.cfg.Dialect == "vllm-mooncake" {
			s.links[0], err = p.text("transfer_id")
			return s, cmp.Or(err, oneToken(f), p.is("do_remote_prefill", "false"), p.only("do_remote_decode", "do_remote_prefill", "transfer_id"))
		}
		return s, cmp.Or(oneToken(f), p.is("do_remote_prefill", "false"), p.is("remote_engine_id", "null"), p.is("remote_block_ids", "null"),
			p.is("remote_host", "null"), p.is("remote_port", "null"),
			p.only("do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
	}
	s := sight{leg: legDecode}
	if err := cmp.Or(p.is("do_remote_prefill", "true"), p.is("do_remote_decode", "false")); err != nil {
		return s, err
	}
	if s.engine, err = p.text("remote_engine_id"); err != nil {
		return s, err
	}
	if e.cfg.Dialect == "vllm-mooncake" {
		link, err1 := p.text("transfer_id")
		addr, err2 := p.text("remote_bootstrap_addr")
		u, err3 := url.Parse(addr)
		if err := cmp.Or(err1, err2, err3); err != nil {
			return s, err
		}
		s.links, s.peer = []string{link}, u.Host
		return s, p.only("do_remote_decode", "do_remote_prefill", "remote_bootstrap_addr", "remote_engine_id", "transfer_id")
	}
	link, err1 := p.text("remote_request_id")
	s.links = []string{link}
	var err2 error
	s.peer, err2 = p.hostPort("remote_host", "remote_port")
	if e.cfg.Dialect != "vllm-nixl-push" {
		return s, cmp.Or(err1, err2, p.is("remote_num_tokens", "9"),
			p.is("mock_opaque", "1.5", "1.50")) // from prefill's answer, verbatim or re-encoded by a proxy
	}
	if err1 == nil && link != id {
		err1 = fmt.Errorf("remote_request_id is %s, X-Request-Id is %s", link, id)
	}
	return s, cmp.Or(err1, err2, p.only("do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_host", "remote_port",
		"tp_size", "pp_size", "remote_request_id"))
}

func checkOffloading(f, p fieldsOf) (sight, error) {
	if d, err := p.object("remote_decoder"); err == nil {
		link, err := d.text("kv_request_id")
		return sight{leg: legPrefill, links: []string{link}}, cmp.Or(err, oneToken(f), p.only("remote_decoder"))
	}
	d, err := p.object("remote_prefiller")
	if err != nil {
		return sight{}, err
	}
	link, err1 := d.text("kv_request_id")
	peer, err2 := d.hostPort("remote_host", "remote_port")
	return sight{leg: legDecode, links: []string{link}, peer: peer}, cmp.Or(err1, err2, p.only("remote_prefiller"))
}

var ncclID = regexp.MustCompile(`^___prefill_addr_(.*:\d+)___decode_addr_(.*:\d+)_[0-9a-f]{32}$`)

func (e *Engine) checkNccl(h http.Header, f fieldsOf) (sight, error) {
	id := h.Get("X-Request-Id")
	m := ncclID.FindStringSubmatch(id)
	if m == nil {
		return sight{}, fmt.Errorf("X-Request-Id %q holds no addresses", id)
	}
	if e.cfg.Role == legDecode {
		return sight{leg: legDecode, links: []string{id}, peer: m[1]}, nil
	}
	return sight{leg: legPrefill, links: []string{id}}, f.is("max_tokens", "1")
}

func (e *Engine) checkSGLang(f fieldsOf) (sight, error) {
	s := sight{leg: e.cfg.Role}
	prompts := promptsOf(f)
	rooms, err1 := perPrompt[json.Number](f, "bootstrap_room", prompts)
	hosts, err2 := perPrompt[string](f, "bootstrap_host", prompts)
	ports, err3 := perPrompt[*uint16](f, "bootstrap_port", prompts)
	if err := cmp.Or(f.needs("bootstrap_room"), err1, err2, err3); err != nil {
		return s, err
	}
	for _, r := range rooms {
		if _, err := strconv.ParseInt(string(r), 10, 64); err != nil || r[0] == '-' {
			return s, fmt.Errorf("bootstrap_room %s is not within [0, 2^63-1]", r)
		}
		if slices.Contains(s.links, string(r)) {
			return s, fmt.Errorf("bootstrap_room %s came twice", r)
		}
		s.links = append(s.links, string(r))
	}
	if ports[0] == nil {
		return s, fmt.Errorf("bootstrap_port is null; this mock has no default")
	}
	s.peer = net.JoinHostPort(hosts[0], strconv.Itoa(int(*ports[0])))
	return s, nil
}

// perPrompt reads a field: one value or, for a batch, a list with one per prompt.
func perPrompt[T any](f fieldsOf, name string, prompts int) ([]T, error) {
	list := make([]T, 1)
	var to any = &list[0]
	if prompts > 1 {
		to = &list
	}
	if err := json.Unmarshal(f[name], to); err != nil || len(list) != prompts {
		return nil, fmt.Errorf("%s is %s, want what a batch of %d needs: %v", name, shown(f[name]), prompts, err)
	}
	return list, nil
}

func (e *Engine) checkTRT(f fieldsOf) (sight, error) {
	if !f.has("disaggregated_params") {
		return sight{leg: legPlain}, nil
	}
	p, err := f.object("disaggregated_params")
	if err != nil {
		return sight{}, err
	}
	id := string(p["disagg_request_id"])
	if n, err := strconv.ParseInt(id, 10, 64); err != nil || n <= 0 {
		return sight{}, fmt.Errorf("disagg_request_id is %s", shown(p["disagg_request_id"]))
	}
	style := map[string]string{"trtllm": `"context_first"`, "trtllm-generation-first": `"generation_first"`}[e.cfg.Dialect]
	s := sight{links: []string{id}, disagg: id}
	if string(p["request_type"]) == `"context_only"` {
		s.leg = legPrefill
		return s, cmp.Or(f.is("stream", "false"), f.none("stream_options"), p.is("schedule_style", style), p.only("request_type", "disagg_request_id", "schedule_style"))
	}
	s.leg = legDecode
	if err := p.is("request_type", `"generation_only"`); err != nil {
		return s, err
	}
	if e.cfg.Dialect == "trtllm" {
		s.peer, err = p.text("encoded_opaque_state") // of our mock: its address
		field := "prompt"
		if f.has("messages") {
			field = "prompt_token_ids"
		}
		if err == nil && !strings.HasPrefix(string(f[field]), "[") {
			err = fmt.Errorf("%s is %s, want prefill's token ids", field, shown(f[field]))
		}
		return s, cmp.Or(err, p.is("ctx_request_id", "77"), p.is("first_gen_tokens", "[5]"), p.needs("ctx_usage"))
	}
	s.peer, err = p.text("ctx_info_endpoint")
	return s, cmp.Or(err, p.is("ctx_request_id", id), p.is("schedule_style", style))
}

func promptsOf(f fieldsOf) int {
	var list []json.RawMessage
	if json.Unmarshal(f["prompt"], &list) != nil || len(list) == 0 || list[0][0] != '"' && list[0][0] != '[' {
		return 1
	}
	return len(list)
}
