package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/router/apikey"
)

var errNoFile = errors.New("--file: the file of keys is needed")

func newKeys() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "keys",
		Short: "Make API keys for a router, and list them",
		Long: `A file of keys holds the hash of each key, its owner's name and limits. The router
that has it as api_keys_file reads it again when it changes.`,
		Example: "  xpyd keys new --file keys.yaml --name team-a --tokens-per-minute 100000\n  xpyd keys list --file keys.yaml",
		RunE:    func(cmd *cobra.Command, args []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newKeysNew(), newKeysList())
	return cmd
}

func newKeysNew() *cobra.Command {
	var file, expires string
	var k apikey.Key
	cmd := &cobra.Command{
		Use:     "new --file FILE --name NAME",
		Short:   "Make a key: it is printed once, and its hash is added to the file",
		Example: "  xpyd keys new --file keys.yaml --name team-a --requests-per-minute 600 --priority high --models 'llama-3,qwen-*'",
	}
	f := cmd.Flags()
	f.StringVar(&file, "file", "", "the router's api_keys_file; created if missing")
	f.StringVar(&k.Name, "name", "", "the owner, for metrics, logs and the queue")
	f.Int64Var(&k.RequestsPerMinute, "requests-per-minute", 0, "0 is no limit")
	f.Int64Var(&k.TokensPerMinute, "tokens-per-minute", 0, "of prompts and answers; 0 is no limit")
	f.IntVar(&k.MaxInFlight, "max-in-flight", 0, "requests at once; 0 is no limit")
	f.Float64Var(&k.Weight, "weight", 0, "share of the places while requests wait; 0 is 1")
	f.StringVar(&k.Priority, "priority", "", "the highest that requests may ask for: high, normal or low; default normal")
	f.DurationVar(&k.TTFTPromise, "ttft-promise", 0, "time to the first token that its requests are promised; 0 is what the workers promise")
	f.DurationVar(&k.TPOTPromise, "tpot-promise", 0, "mean time between tokens that they are promised; 0 is what the workers promise")
	f.DurationVar(&k.ITLPromise, "itl-promise", 0, "longest time between two tokens that they are promised; 0 is what the workers promise")
	f.StringSliceVar(&k.Models, "models", nil, "models that may be used, a prefix with * at its end; default all")
	f.StringVar(&k.Cache, "cache", "", "its prefix cache, of xpyd's own workers: keys with the same name share it, and shared is everybody's; default its own")
	f.BoolVar(&k.NamesTenants, "names-tenants", false, "for a gateway: it may say whose a request is (tenant_header)")
	f.StringVar(&expires, "expires", "", "when it expires: a duration (720h) or a time (2027-01-01T00:00:00Z); default never")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		secret, made := apikey.New(k.Name)
		k.SHA256 = made.SHA256
		var err error
		switch {
		case file == "":
			err = errNoFile
		case expires != "":
			k.Expires, err = expiry(expires, time.Now())
		}
		if err == nil {
			err = k.Validate()
		}
		if err != nil {
			return usageError{err}
		}
		if err := apikey.Append(file, k); err != nil {
			return err
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), secret)
		return err
	}
	return cmd
}

// expiry reads a duration from now, or a time.
func expiry(text string, now time.Time) (time.Time, error) {
	var t time.Time
	d, err := time.ParseDuration(text)
	if err == nil {
		t = now.Add(d).Truncate(time.Second)
	} else {
		t, err = time.Parse(time.RFC3339, text)
	}
	switch {
	case err == nil && !t.After(now):
		return t, fmt.Errorf("--expires: %q is not in the future", text)
	case err != nil:
		return t, fmt.Errorf("--expires: %q is neither a duration such as 720h nor a time such as 2027-01-01T00:00:00Z", text)
	}
	return t, nil
}

func newKeysList() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:     "list --file FILE",
		Short:   "List whose keys are in the file, and their limits",
		Example: "  xpyd keys list --file keys.yaml",
	}
	cmd.Flags().StringVar(&file, "file", "", "the file of keys")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if file == "" {
			return usageError{errNoFile}
		}
		list, err := apikey.Read(file)
		if err != nil {
			return usageError{err}
		}
		out := cmd.OutOrStdout()
		fmt.Fprintf(out, "%-24s %10s %12s %6s %8s  %s\n", "NAME", "REQ/MIN", "TOKENS/MIN", "AT ONCE", "PRIORITY", "ENDS")
		for i := range list {
			k := &list[i]
			end := "never"
			if !k.Expires.IsZero() {
				end = k.Expires.Format(time.RFC3339)
			}
			fmt.Fprintf(out, "%-24s %10s %12s %6s %8s  %s\n", k.Name, limited(k.RequestsPerMinute), limited(k.TokensPerMinute),
				limited(int64(k.MaxInFlight)), k.Class(), end)
		}
		return nil
	}
	return cmd
}

func limited(n int64) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}
