package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/talk"
)

// maxLine bounds what is typed at once, or piped in.
const maxLine = 8 << 20

// chat is a conversation at a terminal: answers go to out, all else to notes.
type chat struct {
	client     talk.Client
	system     string
	timing     bool
	said       []talk.Message
	out, notes io.Writer
}

func newChat() *cobra.Command {
	c := &chat{}
	var temperature float64
	cmd := &cobra.Command{
		Use: "chat [MESSAGE...]", Short: "Talk with a model in the terminal",
		Long: `Talk with a model behind any OpenAI-compatible server. Each line is a turn; /new begins
another conversation, and Ctrl-D ends it. With a MESSAGE, or if standard input is no
terminal, that is the only turn. The answer goes to standard output, all else to standard
error. A model without a chat template continues the text instead, as --raw does.`,
		Example: "  xpyd chat\n  xpyd chat Name three colours.\n  xpyd chat --system 'Answer in French.' --temperature 0\n  xpyd chat --system 'Say in a sentence what this changes.' <change.diff\n  xpyd chat --url https://api.example.com --model m",
		Args:    cobra.ArbitraryArgs,
	}
	f := cmd.Flags()
	f.StringVar(&c.client.URL, "url", "http://127.0.0.1:8000", "address of the server, with or without /v1")
	f.StringVar(&c.client.APIKey, "api-key", "", "bearer token (default $XPYD_API_KEY)")
	f.StringVar(&c.client.Model, "model", "", "model to ask for (default: the first of GET /v1/models)")
	f.StringVar(&c.system, "system", "", "the system's message")
	f.IntVar(&c.client.MaxTokens, "max-tokens", 0, "the most tokens of an answer (default: as the server has it; with --raw 256)")
	f.Float64Var(&temperature, "temperature", 0, "0 is greedy (default: as the server has it)")
	f.BoolVar(&c.client.Raw, "raw", false, "continue the text, without a chat template")
	f.BoolVar(&c.timing, "timing", false, "after each answer its times")
	f.DurationVar(&c.client.Silence, "timeout", 5*time.Minute, "the longest that the server may say nothing")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		switch {
		case c.client.MaxTokens < 0:
			return usageError{errors.New("--max-tokens: want at least 1")}
		case math.IsNaN(temperature) || math.IsInf(temperature, 0):
			return usageError{errors.New("--temperature: want a number")}
		case c.client.URL == "":
			return usageError{errors.New("--url is empty")}
		case c.client.Silence <= 0:
			return usageError{errors.New("--timeout: want more than 0")}
		}
		if cmd.Flags().Changed("temperature") {
			c.client.Temperature = &temperature
		}
		return c.run(cmd, args)
	}
	return cmd
}

func (c *chat) run(cmd *cobra.Command, args []string) error {
	ctx := cmd.Context()
	c.out, c.notes = cmd.OutOrStdout(), cmd.ErrOrStderr()
	c.client.APIKey = cmp.Or(c.client.APIKey, os.Getenv("XPYD_API_KEY"))
	if !strings.Contains(c.client.URL, "://") {
		c.client.URL = "http://" + c.client.URL
	}
	c.client.HTTP = &http.Client{Transport: &http.Transport{Proxy: http.ProxyFromEnvironment}}
	defer c.client.HTTP.CloseIdleConnections()
	if c.client.Model == "" {
		base := withoutV1(c.client.URL)
		var err error
		if c.client.Model, err = firstModel(ctx, base+"/v1/models", c.client.APIKey); err != nil {
			return fmt.Errorf("no model at %s: %w; start one with `xpyd up`, or say where it is with --url and --model, and by which key with --api-key or XPYD_API_KEY", base, err)
		}
	}
	c.forget()
	in := cmd.InOrStdin()
	terminal, _ := in.(*os.File)
	switch {
	case len(args) > 0:
		return c.turn(ctx, strings.Join(args, " "))
	case !isTerminal(in):
		text, err := io.ReadAll(io.LimitReader(in, maxLine+1))
		if err != nil {
			return err
		}
		if len(text) > maxLine {
			return usageError{fmt.Errorf("standard input is over %d bytes", maxLine)}
		}
		return c.turn(ctx, strings.TrimRight(string(text), "\n"))
	}
	fmt.Fprintf(c.notes, "%s at %s; /new begins again, Ctrl-D ends\n", plain(c.client.Model), c.client.URL)
	return c.converse(ctx, typedLines(ctx, terminal))
}

// forget begins another conversation.
func (c *chat) forget() {
	if c.said = nil; c.system != "" {
		c.said = []talk.Message{{Role: "system", Content: c.system}}
	}
}

// converse takes each line for a turn. An error is shown, and the turn forgotten.
func (c *chat) converse(ctx context.Context, next func() (string, error)) error {
	for {
		fmt.Fprint(c.notes, "> ")
		line, err := next()
		line = strings.TrimSpace(line)
		switch {
		case err != nil:
			fmt.Fprintln(c.notes)
			if errors.Is(err, io.EOF) || ctx.Err() != nil {
				return nil
			}
			return err
		case line == "":
		case line == "/new":
			c.forget()
		default:
			if err := c.turn(ctx, line); err != nil && ctx.Err() == nil {
				fmt.Fprintln(c.notes, "xpyd:", plain(err.Error()))
			}
		}
	}
}

func (c *chat) turn(ctx context.Context, text string) error {
	if text == "" {
		return usageError{errors.New("the message is empty")}
	}
	asked := append(c.said, talk.Message{Role: "user", Content: text})
	a, err := c.ask(ctx, asked)
	if talk.NoTemplate(err) && !c.client.Raw {
		fmt.Fprintf(c.notes, "%s has no chat template: it continues your text, and remembers nothing\n", plain(c.client.Model))
		c.client.Raw = true
		a, err = c.ask(ctx, asked)
	}
	if a.Text != "" && !strings.HasSuffix(a.Text, "\n") {
		fmt.Fprintln(c.out)
	}
	if refused, ok := errors.AsType[*talk.Refused](err); ok {
		err = errors.New(plain(refused.Message))
	}
	if err != nil {
		return err
	}
	c.said = append(asked, talk.Message{Role: "assistant", Content: a.Text})
	if a.Finish == "length" {
		fmt.Fprintln(c.notes, "(cut off at the most tokens of an answer; --max-tokens says how many)")
	}
	if c.timing {
		fmt.Fprintln(c.notes, times(&a))
	}
	return nil
}

func (c *chat) ask(ctx context.Context, said []talk.Message) (talk.Answer, error) {
	client := c.client
	if client.Raw && client.MaxTokens == 0 {
		client.MaxTokens = 256 // completions have 16 else
	}
	var broken error // what the answer is written to
	a, err := client.Ask(ctx, said, func(piece string) {
		if _, err := io.WriteString(c.out, printable(piece)); err != nil {
			broken = cmp.Or(broken, err)
		}
	})
	return a, cmp.Or(err, broken)
}

// times says how fast an answer came.
func times(a *talk.Answer) string {
	text := fmt.Sprintf("(first token after %v, all after %v", a.First.Round(time.Millisecond), a.Took.Round(time.Millisecond))
	if rest := (a.Took - a.First).Seconds(); a.Tokens > 1 && rest > 0 {
		text += fmt.Sprintf(", %d tokens, %.1f a second", a.Tokens, float64(a.Tokens-1)/rest)
	}
	return text + ")"
}

// printable keeps a model from steering the terminal: it may write lines and tabs, and nothing else
// that is no text.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && !unicode.IsPrint(r) && !unicode.Is(unicode.Mn, r) && r != 0x200d { // of emoji
			return -1
		}
		return r
	}, s)
}

// typedLines returns a function that waits for a line of a terminal, or for the end of ctx.
func typedLines(ctx context.Context, terminal *os.File) func() (string, error) {
	in := bufio.NewReader(terminal)
	return func() (string, error) {
		if in.Buffered() == 0 {
			if err := untilTyped(ctx, terminal); err != nil {
				return "", err
			}
		}
		return in.ReadString('\n')
	}
}

// untilTyped waits until f can be read. Reading itself cannot be broken off.
func untilTyped(ctx context.Context, f *os.File) error {
	woken, wake, err := os.Pipe()
	if err != nil {
		return err
	}
	defer woken.Close()
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		wake.Close()
		close(closed)
	})
	defer func() {
		if stop() {
			wake.Close()
		} else {
			<-closed
		}
	}()
	polled := []unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLIN}, {Fd: int32(woken.Fd()), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(polled, -1); err != nil && err != unix.EINTR {
			return err
		}
		switch {
		case polled[1].Revents != 0:
			return context.Cause(ctx)
		case polled[0].Revents != 0:
			return nil
		}
	}
}
