// Package responses is OpenAI's Responses API on top of chat completions: a request becomes a chat
// (Parse, Request.Chat), and a chat's answer becomes a response, whole or as events (Answer). It
// knows no HTTP and keeps nothing; router/kept keeps responses.
package responses
