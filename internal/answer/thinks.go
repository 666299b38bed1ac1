package answer

import "bytes"

// Think is a reasoning format: what stands around what a model thinks.
type Think struct {
	Name       string
	start, end string
	opened     bool // the model thinks from its first word on, though no mark says so
	calls      bool // a call also ends it: models forget the mark
	harmony    bool
}

var thinks = []Think{
	{Name: "qwen3", start: "<think>", end: "</think>", calls: true},
	{Name: "deepseek_r1", start: "<think>", end: "</think>", opened: true},
	{Name: "deepseek_v3", start: "<think>", end: "</think>"},
	{Name: "glm45", start: "<think>", end: "</think>"},
	{Name: "kimi_k2", start: "<think>", end: "</think>", calls: true},
	{Name: "kimi", start: "◁think▷", end: "◁/think▷"},
	{Name: "step3", start: "<think>", end: "</think>", opened: true},
	{Name: "minimax_m2", start: "<think>", end: "</think>", opened: true},
	{Name: "nemotron", start: "<think>", end: "</think>"},
	{Name: "mistral", start: "[THINK]", end: "[/THINK]"},
	{Name: "granite", start: "Here is my thought process:", end: "Here is my response:"},
	{Name: "cohere", start: "<|START_THINKING|>", end: "<|END_THINKING|>"},
	{Name: "seed_oss", start: "<seed:think>", end: "</seed:think>"},
	{Name: "openai_gptoss", harmony: true},
}

// ThinkFormat returns the reasoning format of that name; nil: there is none.
func ThinkFormat(name string) *Think {
	for i := range thinks {
		if thinks[i].Name == name {
			return &thinks[i]
		}
	}
	return nil
}

// ThinkNames lists the reasoning formats.
func ThinkNames() (list []string) {
	for i := range thinks {
		list = append(list, thinks[i].Name)
	}
	return list
}

// Prompt reports how a prompt leaves the model: thinking, since it ends with the mark that begins
// that, or done with it.
func (t *Think) Prompt(text string) (thinking, thought bool) {
	if t == nil || t.harmony {
		return false, false
	}
	const most = 256
	end := bytes.TrimRight([]byte(text[max(0, len(text)-most):]), " \t\r\n")
	return bytes.HasSuffix(end, []byte(t.start)), bytes.HasSuffix(end, []byte(t.end))
}

// openMark takes the mark that begins reasoning, with whitespace before it, if it is next. wait: more text will tell.
func (p *Parser) openMark() (took, wait bool) {
	text := bytes.TrimLeft(p.rest(), " \t\r\n")
	has, may := begins(text, p.think.start)
	space := len(p.rest()) - len(text)
	switch {
	case space > maxSpace:
		return false, false
	case has:
		p.take(space + len(p.think.start))
		return true, false
	}
	return false, may && !p.end
}

// thinkMaybe is at the beginning of an answer that may begin with reasoning.
func (p *Parser) thinkMaybe() bool {
	switch took, wait := p.openMark(); {
	case wait:
		return false
	case took:
		p.step, p.header.kind = (*Parser).thoughts, Reasoning
	default:
		p.step = (*Parser).content
	}
	return true
}

// thinkOpened is where reasoning has begun; models repeat the mark.
func (p *Parser) thinkOpened() bool {
	p.header.kind = Reasoning
	if _, wait := p.openMark(); wait {
		return false
	}
	p.step = (*Parser).thoughts
	return true
}

func (p *Parser) thoughts() bool {
	n, which := p.until(p.thinkEnds...)
	if n > 0 {
		p.put(Reasoning, p.rest()[:n])
		p.take(n)
	}
	switch {
	case which < 0:
		return false
	case which > 0: // a call, or the thought of one
		s := p.f.sections[which-1]
		p.try(s)
		p.take(len(s.open))
		p.opened, p.step = true, p.f.start
		return true
	}
	p.take(len(p.think.end))
	p.step, p.header.kind = (*Parser).content, Content
	return true
}
