package answer

import (
	"bytes"
	"strings"
)

// gpt-oss marks each message's channel and recipient:
//
//	<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
//
// The prompt ends with <|start|>assistant.

const (
	markStart   = "<|start|>"
	markChannel = "<|channel|>"
	markMessage = "<|message|>"
	markEnd     = "<|end|>"
	markCall    = "<|call|>"
	markReturn  = "<|return|>"
)

// header is what the message under way is.
type header struct {
	kind Kind
	text []byte
}

// channelText is within a message's text, or where there is no message.
func (p *Parser) channelText() bool {
	n, which := p.until(markChannel, markStart, markEnd, markCall, markReturn, markMessage)
	if n > 0 {
		text := p.rest()[:n]
		p.take(n)
		switch p.header.kind {
		case Arguments:
			p.arguments(text)
		case Begin: // a call that may not be made, or between messages
			if !p.said {
				text = bytes.TrimLeft(text, " \t\r\n")
			}
			p.said = p.said || len(text) > 0
			p.put(Content, text)
		default:
			p.put(p.header.kind, text)
		}
	}
	if which < 0 {
		return false
	}
	p.said = false
	switch which {
	case 0, 1:
		p.header.text = p.header.text[:0]
		p.step = (*Parser).channelHeader
		if which == 1 {
			p.take(len(markStart))
		}
		p.header.kind = Begin
	default:
		p.take(len([]string{2: markEnd, markCall, markReturn, markMessage}[which]))
		p.header.kind = Begin
	}
	return true
}

// channelHeader is before a message's text.
func (p *Parser) channelHeader() bool {
	n, which := p.until(markMessage, markEnd, markCall, markReturn)
	h := &p.header
	n = min(n, 2*maxName+1-len(h.text))
	h.text = append(h.text, p.rest()[:n]...)
	p.take(n)
	if len(h.text) > 2*maxName {
		h.kind, p.step = Content, (*Parser).channelText
		p.put(Content, h.text)
		return true
	}
	if which < 0 {
		if p.end && len(h.text) > 0 {
			h.text = h.text[:0]
		}
		return false
	}
	p.take(len([]string{markMessage, markEnd, markCall, markReturn}[which]))
	p.step = (*Parser).channelText
	if which > 0 {
		return true
	}
	head := string(h.text)
	_, channel, _ := strings.Cut(head, markChannel)
	_, to, called := strings.Cut(head, "to=")
	switch {
	case called && p.recipient(to):
		h.kind = Arguments
	case strings.HasPrefix(strings.TrimSpace(channel), "analysis") && p.think != nil:
		h.kind = Reasoning
	default:
		h.kind = Content
	}
	return true
}

// recipient begins the call that a message is, if it is one.
func (p *Parser) recipient(to string) bool {
	to, _, _ = strings.Cut(strings.TrimSpace(to), "<|")
	fields := strings.Fields(to)
	if p.f == nil || len(fields) == 0 {
		return false
	}
	name := strings.TrimPrefix(fields[0], "functions.")
	if !p.opt.Tools.Has(name) || p.opt.Tools == nil {
		name = name[strings.LastIndexByte(name, '.')+1:]
	}
	p.call, p.within = call{name: name}, section{}
	if strings.HasPrefix(fields[0], "functions.") {
		p.within.open = markChannel
	}
	return name != "" && p.begin()
}
